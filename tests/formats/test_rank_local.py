"""FSDP1's local state dicts: what torch itself writes, runs that go on from what is written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.conversion import Options, write_checkpoint
from ckptkit.core.checkpoint import ModelFacts
from ckptkit.core.spec import Tensor
from ckptkit.core.transform import same_value
from ckptkit.core.tree import walk
from ckptkit.errors import Exit, LossError, UsageError
from ckptkit.formats._fsdp_units import Wrapping, flat_units, wrapped
from ckptkit.formats._rank_joint import ids_of_units, joint_state
from ckptkit.formats._rank_parts import Sharded, load_parts
from ckptkit.io.model import describe, facts_of
from ckptkit.opened import read_tensor
from ckptkit.verify.workload import Workload, build_model, units
from fixtures.catalog import BF16, UNITS, Fixture
from fixtures.make import make

from ..cli.run import ckptkit as ckptkit_command
from ..truth import DEFAULT_MODEL, Truth, differences, truth_of

Build = Callable[[str], Path]
# Groups that never cut through a unit: what use_orig_params=False needs, and the others can have as well.
SOURCES = {
    "DDP": Fixture("ddp-units", "ddp", "full", path="ckpt.pt", format="full", workload=UNITS),
    "ZeRO-3": Fixture("zero3-units", "zero3", "native", options={"details": {"config": {}}}, format="zero",
                      dialect="deepspeed", workload=UNITS),
}  # fmt: skip


def wrapped_modules() -> list[str]:
    """The paths of the modules that the test workload's FSDP1 wraps."""
    model = build_model(Workload(), 0)
    paths = {id(module): path for path, module in model.named_modules()}
    return [paths[id(unit)] for unit in units(model)]


@pytest.fixture(scope="module")
def source(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Truth]:
    folder = tmp_path_factory.mktemp("sources")

    def build(name: str) -> Truth:
        fixture = SOURCES[name]
        if not (folder / fixture.name).exists():
            make(fixture, folder, pool)
        return truth_of(folder / fixture.name)

    return build


def _convert(truth: Truth, out: Path, world_size: int, orig: bool, **more: Any) -> Any:
    how = {"fsdp_units": wrapped_modules(), "mesh": "cpu", "model": truth.model, "param_names": _names(truth), **more}
    return ckptkit.convert(truth.path, out, to="fsdp1-local", world_size=world_size, use_orig_params=orig, **how)


def _resume(pool: Any, truth: Truth, out: Path, world_size: int, orig: bool, **more: Any) -> Any:
    job = {"strategy": "fsdp1", "form": "local", "path": str(out), "workload": truth.info["workload"]}
    options = {**more, "details": {"use_orig_params": orig}}
    return pool.run("tests.formats.torch_jobs:resume", world_size=world_size, options=options, **job)[0]


def _names(truth: Truth) -> list[str]:
    return [name for group in truth.info["param_groups"] for name in group["params"]]


def _losses(truth: Truth) -> list[float]:
    losses: list[float] = json.loads((truth.folder / "continue.json").read_text())["losses"]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("world_size", [3, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_fsdp1_trains_on(
    name: str, world_size: int, orig: bool, source: Callable[[str], Truth], pool: Any, tmp_path: Path
) -> None:
    truth = source(name)
    report = _convert(truth, tmp_path / "out", world_size, orig)
    assert report.plan.drops == () and report.checked == "full"
    assert any("strict=False" in warning for warning in report.plan.warnings) == orig
    written = ckptkit.open(tmp_path / "out", model=truth.model, param_names=_names(truth))
    assert differences(written, truth) == [] and written.world_size == world_size
    resumed = _resume(pool, truth, tmp_path / "out", world_size, orig)
    assert [key for key, tensor in truth.tensors.items() if not torch.equal(resumed.state.tensors[key], tensor)] == []
    assert resumed.losses == pytest.approx(_losses(truth), rel=1e-6, abs=0)


def _in_another_order(truth: Truth, one: str, other: str, out: Path, *, orig: bool) -> None:
    """Written by a model in which two parameters have changed places."""
    facts = describe(DEFAULT_MODEL)
    changed = {one: other, other: one}
    order = {changed.get(name, name): facts.parameters[changed.get(name, name)] for name in facts.parameters}
    options = Options("fsdp1-local", world_size=3, mesh="cpu", model=replace(facts, parameters=order),
                      fsdp_units=tuple(wrapped_modules()), use_orig_params=orig)  # fmt: skip
    checkpoint = ckptkit.open(truth.path, model=facts, param_names=_names(truth))
    write_checkpoint(checkpoint, out, options)


@pytest.mark.slow
def test_another_order_within_a_unit_is_seen(source: Callable[[str], Truth], pool: Any, tmp_path: Path) -> None:
    """The control: two parameters of one unit, of equal shapes so that nothing else fails, have changed places."""
    truth = source("DDP")
    one, other = "blocks.0.norm1.weight", "blocks.0.norm1.bias"
    _in_another_order(truth, one, other, tmp_path / "out", orig=False)
    resumed = _resume(pool, truth, tmp_path / "out", 3, orig=False)
    assert torch.equal(resumed.state.tensors[one, "value"], truth.tensors[other, "value"])
    assert resumed.losses != pytest.approx(_losses(truth), rel=3e-6, abs=0)


@pytest.mark.slow
def test_another_order_of_named_vectors_is_refused(source: Callable[[str], Truth], pool: Any, tmp_path: Path) -> None:
    """With use_orig_params names are loaded, and FSDP1 itself sees where another order moved what a rank has of one."""
    truth = source("DDP")
    _in_another_order(truth, "blocks.0.norm1.weight", "blocks.0.down.weight", tmp_path / "out", orig=True)
    with pytest.raises(Exception, match="size mismatch"):
        _resume(pool, truth, tmp_path / "out", 3, orig=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp1-local", "fsdp1-local-ws3", "fsdp1-local-flatparam"])
def test_files_are_those_that_torch_writes(name: str, fixture_dir: Build, tmp_path: Path) -> None:
    """Every key, shape, shard and optimizer vector of every rank; padding between parameters alone may differ."""
    truth = truth_of(fixture_dir(name))
    orig = truth.info["options"].get("details", {}).get("use_orig_params", True)
    _convert(truth, tmp_path / "out", truth.info["world_size"], orig)
    theirs = sorted(truth.path.iterdir())
    assert len(theirs) == truth.info["world_size"]
    for file in theirs:
        expected, found = load_parts(file), load_parts(tmp_path / "out" / file.name)
        assert found.keys() == expected.keys() and found["model"].keys() == expected["model"].keys()
        for key, value in expected["model"].items():
            mine = found["model"][key]
            if isinstance(value, Sharded):
                assert (mine.shape, mine.dtype, mine.rank, mine.world_size) == (
                    value.shape, value.dtype, value.rank, value.world_size)  # fmt: skip
                assert [box for box, _ in mine.parts] == [box for box, _ in value.parts], key
                if not orig:
                    for (_, a), (_, b) in zip(mine.parts, value.parts, strict=True):
                        assert torch.equal(read_tensor(a), read_tensor(b)), key
            else:
                assert torch.equal(read_tensor(mine), read_tensor(value)), key
        assert _optimizer(found) == _optimizer(expected)
        assert same_value(found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"])


def _optimizer(tree: Mapping[str, Any]) -> dict[Any, Any]:
    state = walk(tree["optimizer"]["state"])
    return {path: read_tensor(value).tolist() if isinstance(value, Tensor) else value for path, value in state}


@pytest.mark.slow
def test_the_dtype_that_is_computed_in_aligns(source: Callable[[str], Truth], pool: Any, tmp_path: Path) -> None:
    """MixedPrecision moves parameters to multiples of 16 bytes of its own dtype: written, refused without, and read."""
    truth = source("DDP")
    _convert(truth, tmp_path / "out", 2, True, fsdp_param_dtype="bf16")
    resumed = _resume(pool, truth, tmp_path / "out", 2, True, **BF16)
    assert [key for key, tensor in truth.tensors.items() if not torch.equal(resumed.state.tensors[key], tensor)] == []
    _convert(truth, tmp_path / "narrow", 2, True)
    with pytest.raises(Exception, match="size mismatch"):
        _resume(pool, truth, tmp_path / "narrow", 2, True, **BF16)
    theirs = truth_of(make(Fixture("local-bf16", "fsdp1", "local", options=BF16, format="rank_files"), tmp_path, pool))
    checkpoint = ckptkit.open(theirs.path, model=theirs.model, param_names=_names(theirs))
    assert differences(checkpoint, theirs) == []


@pytest.mark.slow
def test_what_each_rank_has_goes_round(fixture_dir: Build, tmp_path: Path) -> None:
    """RNG states of two ranks: three ranks get copies, one rank has no room for both, and that is a drop."""
    truth = truth_of(fixture_dir("fsdp1-local-flatparam"))
    _convert(truth, tmp_path / "three", 3, False)
    source = ckptkit.open(truth.path, model=truth.model)
    written = ckptkit.open(tmp_path / "three", model=truth.model, param_names=_names(truth))
    held = [written.extra("rng")[f"rank_{rank}"]["python"] for rank in range(3)]
    assert held[0] == held[2] != held[1]
    assert held[1] == source.extra("rng")["rank_1"]["python"]
    with pytest.raises(LossError) as caught:
        _convert(truth, tmp_path / "one", 1, False)
    assert any(fault.startswith("rng: each rank of the source has its own") for fault in caught.value.faults)
    _convert(truth, tmp_path / "one", 1, False, allow_drop=True)
    assert differences(ckptkit.open(tmp_path / "one", model=truth.model, param_names=_names(truth)), truth) == []


@pytest.mark.slow
def test_the_model_is_needed(fixture_dir: Build, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("ddp-full"))
    with pytest.raises(UsageError, match="without the model") as caught:
        _convert(truth, tmp_path / "out", 2, True, model=None)
    assert "--model" in caught.value.hint and not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="do not fit") as caught:
        _convert(truth, tmp_path / "out", 2, True, model=DEFAULT_MODEL, rename=("^norm[.]=last.",))
    assert {"last.weight is not in the model", "norm.weight is not in the checkpoint"} <= set(caught.value.faults)


@pytest.mark.slow
def test_groups_that_cut_through_a_unit_are_refused(fixture_dir: Build, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("ddp-full"))
    with pytest.raises(LossError, match="groups cut through units") as caught:
        _convert(truth, tmp_path / "out", 2, False)
    assert any(fault.startswith("blocks.0: ") and "group 1" in fault for fault in caught.value.faults)
    assert "--use-orig-params" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "orig", "fault"),
    [
        (["embedding"], True, "head.weight (in the model itself) is tied to embedding.weight (in embedding)"),
        (["Block"], False, "the model itself has frozen parameters (frozen.weight) beside trained ones"),
    ],
)
def test_units_that_fsdp1_would_not_wrap(names: list[str], orig: bool, fault: str) -> None:
    facts = describe(DEFAULT_MODEL)
    dtypes = dict.fromkeys(facts.parameters, "float32")
    with pytest.raises(UsageError, match="cannot wrap") as caught:
        flat_units(facts, dtypes, Wrapping(names, orig, 2))
    assert caught.value.faults == (fault,)
    good = flat_units(facts, dtypes, Wrapping(["Block", "frozen"], orig, 2))
    assert [unit.key for unit in good] == [
        "_flat_param", "frozen._flat_param", "blocks.0._flat_param", "blocks.1._flat_param"]  # fmt: skip


class Inner(nn.Linear):
    pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(3, 3)
        self.own = nn.Parameter(torch.zeros(5))


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Outer() for _ in range(2))
        self.scale = nn.Parameter(torch.zeros(()))
        self.narrow = nn.Linear(2, 2, dtype=torch.bfloat16)


@pytest.fixture
def tree() -> ModelFacts:
    return facts_of(Tree())


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], [""]),
        (["Outer"], ["", "layers.0", "layers.1"]),
        (["layers.*"], ["", "layers.0", "layers.1"]),
        (["layers.*.inner", "narrow"], ["", "layers.0.inner", "layers.1.inner", "narrow"]),
        (["Linear"], ["", "layers.0.inner", "layers.1.inner", "narrow"]),  # and its subclasses, as isinstance has it
        (["Tree"], [""]),
    ],
)
def test_names_of_units(names: list[str], found: list[str], tree: ModelFacts) -> None:
    assert wrapped(tree, names) == found


def test_names_that_fit_nothing_are_all_named(tree: ModelFacts) -> None:
    with pytest.raises(UsageError) as caught:
        wrapped(tree, ["Block", "Outer", "layers.2"])
    assert caught.value.faults == ("Block is neither", "layers.2 is neither") and "Outer" in caught.value.hint


def test_children_come_before_their_parents(tree: ModelFacts) -> None:
    plain = replace(tree, parameters={name: shape for name, shape in tree.parameters.items() if shape})
    found = flat_units(plain, _dtypes(plain), Wrapping(["Outer", "Inner", "narrow"], False, 2))
    assert {unit.path: list(unit.members) for unit in found} == {
        "layers.0": ["layers.0.own"], "layers.0.inner": ["layers.0.inner.weight", "layers.0.inner.bias"],
        "layers.1": ["layers.1.own"], "layers.1.inner": ["layers.1.inner.weight", "layers.1.inner.bias"],
        "narrow": ["narrow.weight", "narrow.bias"],
    }  # fmt: skip


def _dtypes(facts: ModelFacts) -> dict[str, str]:
    return {name: "bfloat16" if name.startswith("narrow") else "float32" for name in facts.parameters}


def test_scalars_and_mixed_dtypes_are_refused(tree: ModelFacts) -> None:
    with pytest.raises(UsageError) as caught:
        flat_units(tree, _dtypes(tree), Wrapping(["Outer"], True, 2))
    assert caught.value.faults == ("scale is 0-d", "the model itself has parameters of bfloat16 and float32")


def test_ranks_that_get_nothing(tree: ModelFacts) -> None:
    """Five elements over four ranks: two, two, one, none, as `torch.chunk` cuts; the optimizer pads them."""
    plain = replace(tree, parameters={"layers.0.own": (5,)})
    (unit,) = flat_units(plain, _dtypes(plain), Wrapping(["Outer"], False, 4))
    chunks = [len(chunk) for chunk in torch.arange(5).chunk(4)]
    assert [unit.stored(rank) for rank in range(4)] == [*chunks, 0] and unit.size == 2
    assert [unit.local("layers.0.own", rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (6, 6)]
    (aligned,) = flat_units(plain, _dtypes(plain), Wrapping(["Outer"], True, 4))
    assert (aligned.numel, aligned.size) == (8, 2)


def test_a_unit_has_one_step(tree: ModelFacts) -> None:
    plain = replace(tree, parameters={name: shape for name, shape in tree.parameters.items() if "layers.0" in name})
    found = flat_units(plain, _dtypes(plain), Wrapping(["Outer"], False, 2))
    state = {name: {"step": 3} for name in plain.parameters}
    assert joint_state(found, state) == ({"layers.0": {"step": 3}}, [])
    with pytest.raises(LossError) as caught:
        joint_state(found, {**state, "layers.0.own": {"step": 4}})
    assert any("step" in fault and "differ" in fault for fault in caught.value.faults)
    groups = [{"lr": 1, "params": ["layers.0.own"]}]
    with pytest.raises(LossError, match="cut through"):
        ids_of_units(found, groups)


@pytest.mark.slow
def test_the_command_takes_it(fixture_dir: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = truth_of(fixture_dir("ddp-full"))
    command = ["convert", truth.path, tmp_path / "out", "--to", "fsdp1-local", "--world-size", "3", "--mesh", "cpu",
               "--model", DEFAULT_MODEL, "--fsdp-units", "Block, frozen"]  # fmt: skip
    result = ckptkit_command(capsys, *command)
    assert result.code == Exit.LOSS and "--use-orig-params" in result.err
    result = ckptkit_command(capsys, *command, "--use-orig-params", "--fsdp-param-dtype", "fp32")
    assert result.code == 0 and "strict=False" in result.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"checkpoint_rank_{r}.pt" for r in range(3)]
    assert differences(ckptkit.open(tmp_path / "out", model=DEFAULT_MODEL, param_names=_names(truth)), truth) == []
