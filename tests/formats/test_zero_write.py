"""zero: what is written loads in real engines, of other stages and world sizes, and training goes on as if unbroken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.transform import same_value
from ckptkit.errors import LossError, UsageError
from ckptkit.verify.pool import Pool
from tests.truth import Truth, truth_of

from .zero_edit import copy_of, edit_optims, tag_of
from .zero_jobs import Resumed

pytestmark = pytest.mark.slow
Fixtures = Callable[[str], Path]
JOB = "tests.formats.zero_jobs:resume"
# fp32 sums over another number of ranks round differently; bf16 gradients do so at 2**-8.
BOUNDS = {"fp32": 1e-6, "bf16": 2e-3}


def losses_after(truth: Truth) -> list[float]:
    return json.loads((truth.folder / "continue.json").read_text())["losses"]


def gap(losses: list[float], expected: list[float]) -> float:
    """The greatest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def state_faults(resumed: Resumed, truth: Truth) -> list[str]:
    """Where an engine's state after loading is not that of the run that wrote the source."""
    held = resumed.state
    found = [
        f"{key}" for key, t in truth.tensors.items() if key not in held.tensors or not torch.equal(held.tensors[key], t)
    ]
    found += [f"invented {key}" for key in held.tensors if key not in truth.tensors]
    if not same_value(held.groups, truth.info["param_groups"]):
        found.append("groups")
    scheduler = {key: value for key, value in held.scheduler.items() if key != "lr_lambdas"}
    if not same_value(scheduler, truth.info["scheduler"]):
        found.append("scheduler")
    if resumed.global_steps != truth.info["step"]:
        found.append(f"global_steps {resumed.global_steps}")
    return found


def precision(truth: Truth) -> str:
    return truth.info["options"].get("precision", "fp32")


def run(
    pool: Pool, truth: Truth, out: Path, strategy: str, ranks: int, config: dict[str, Any] | None = None
) -> Resumed:
    options = {key: value for key, value in truth.info["options"].items() if key != "details"}
    if config:
        options["details"] = {"config": config}
    return pool.run(JOB, world_size=ranks, strategy=strategy, path=str(out), options=options)[0]


MATRIX = [
    ("zero2", "zero3", 3), ("zero3", "zero2", 3), ("zero2-ws3", "zero1", 2), ("zero1", "zero2", 1),
    ("zero3", "zero3", 4), ("zero2", "zero0", 2), ("zero3-ws3", "zero1", 4), ("zero3-bf16", "zero1", 3),
    ("zero1-bf16", "zero3", 3), ("zero2-bf16", "zero0", 2), ("zero1-bf16-optimizer", "zero2", 3),
    ("zero1-sgd", "zero3", 3), ("zero3-sgd", "zero2", 1), ("zero2-round-robin", "zero3", 2),
    ("zero1-aligned", "zero2", 2), ("zero3-subgroups", "zero3", 3), ("universal-zero1", "zero3", 3),
    ("universal-zero3-bf16", "zero1", 2), ("zero2", "zero2-offload", 3), ("zero1", "zero3-offload", 2),
]  # fmt: skip


@pytest.mark.parametrize(("source", "strategy", "ranks"), MATRIX, ids=lambda value: str(value))
def test_a_real_engine_goes_on(
    source: str, strategy: str, ranks: int, fixture_dir: Fixtures, pool: Pool, tmp_path: Path
) -> None:
    """Weights, masters, moments, steps, groups, scheduler, buffers, frozen and tied parameters; then the losses."""
    truth = truth_of(fixture_dir(source))
    ckptkit.convert(truth.path, tmp_path / "out", to=strategy.partition("-")[0], world_size=ranks)
    resumed = run(pool, truth, tmp_path / "out", strategy, ranks)
    assert state_faults(resumed, truth) == []
    assert gap(resumed.losses, losses_after(truth)) < BOUNDS[precision(truth)]
    assert resumed.client["note"]["tokens_seen"] == 396


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


BF16 = {"bf16": {"enabled": True}}
CONFIGS = {
    "sub-groups": ("zero1-bf16", "zero3", 3, {**BF16, **zero(3, sub_group_size=2000)}),
    "one parameter a sub-group": ("zero2", "zero3", 2, zero(3, sub_group_size=1)),
    "aligned": ("zero3-bf16", "zero1", 3, {**BF16, **zero(1, parameter_alignment=True)}),
    "aligned fp32": ("zero3", "zero2", 3, zero(2, parameter_alignment=True)),
    "round robin": ("zero3", "zero2", 3, zero(2, round_robin_gradients=True)),
    "round robin aligned": (
        "zero3-bf16", "zero2", 2, {**BF16, **zero(2, round_robin_gradients=True, parameter_alignment=True)}
    ),
    "elastic": ("zero3", "zero2", 3, zero(2, elastic_checkpoint=True)),
    "BF16_Optimizer": (
        "zero3-bf16", "zero1", 3,
        {**BF16, "data_types": {"grad_accum_dtype": "fp32"}, **zero(1, round_robin_gradients=True)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_changes_the_files(case: str, fixture_dir: Fixtures, pool: Pool, tmp_path: Path) -> None:
    source, target, ranks, config = CONFIGS[case]
    truth = truth_of(fixture_dir(source))
    ckptkit.convert(truth.path, tmp_path / "out", to=target, world_size=ranks, ds_config=config)
    resumed = run(pool, truth, tmp_path / "out", target, ranks, config)
    assert state_faults(resumed, truth) == []
    assert gap(resumed.losses, losses_after(truth)) < BOUNDS[precision(truth)]


@pytest.mark.parametrize("case", ["aligned", "round robin", "sub-groups"])
def test_the_configuration_matters(case: str, fixture_dir: Fixtures, pool: Pool, tmp_path: Path) -> None:
    """The control: without it the engine refuses the files, or holds other states than the run did."""
    source, target, ranks, config = CONFIGS[case]
    truth = truth_of(fixture_dir(source))
    ckptkit.convert(truth.path, tmp_path / "out", to=target, world_size=ranks)
    try:
        resumed = run(pool, truth, tmp_path / "out", target, ranks, config)
    except Exception as error:
        assert "load_checkpoint" in str(error)
    else:
        assert state_faults(resumed, truth) != []


# From strategies of torch: a frozen parameter, two groups, steps of their own.


@pytest.mark.parametrize(
    ("source", "target", "ranks", "options"),
    [
        ("ddp-full", "zero2", 3, {}),
        ("ddp-full", "zero3", 2, {}),
        ("fsdp2-dcp", "zero1", 3, {}),
        ("fsdp1-full-sgd", "zero3", 3, {}),
        ("fsdp2-dcp", "zero3", 2, {"dtype": "bf16"}),
        ("ddp-full", "zero2", 2, {"dtype": "bf16"}),
    ],
)
def test_a_run_moves_into_deepspeed(
    source: str, target: str, ranks: int, options: dict[str, str], fixture_dir: Fixtures, pool: Pool, tmp_path: Path
) -> None:
    truth = truth_of(fixture_dir(source))
    ckptkit.convert(truth.path, tmp_path / "out", to=target, world_size=ranks, model=truth.model, **options)
    made = {
        **{k: v for k, v in truth.info["options"].items() if k != "details"},
        "precision": options.get("dtype", "fp32"),
    }
    resumed = pool.run(JOB, world_size=ranks, strategy=target, path=str(tmp_path / "out"), options=made)[0]
    held = resumed.state.tensors
    low = torch.bfloat16 if options else torch.float32
    for (fqn, slot), tensor in truth.tensors.items():
        if slot == "value" and (fqn, "master") in held:
            assert torch.equal(held[fqn, "master"], tensor)
            assert torch.equal(held[fqn, "value"], tensor.to(low))
        else:
            assert torch.equal(held[fqn, slot].float(), tensor.to(held[fqn, slot].dtype).float()), (fqn, slot)
    assert resumed.global_steps == 3
    assert gap(resumed.losses, losses_after(truth)) < (2e-2 if options else 1e-6)


# Controls: each of these must be seen.


def swap_moments(tree: dict[str, Any]) -> None:
    """The first moments of two matrices of one shape; the file's own mapping says where they lie."""
    where = tree["param_slice_mappings"][0]
    one, other = where["blocks.0.query.weight"], where["blocks.1.query.weight"]
    held = tree["base_optimizer_state"]["state"][0]["exp_avg"]
    a, b = (held[f.start : f.start + f.numel].clone() for f in (one, other))
    held[one.start : one.start + one.numel], held[other.start : other.start + other.numel] = b, a


def step_off_by_one(tree: dict[str, Any]) -> None:
    for state in tree["base_optimizer_state"]["state"].values():
        state["step"] += 1


def exchange_weight_decay(tree: dict[str, Any]) -> None:
    first, second = tree["base_optimizer_state"]["param_groups"]
    first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]


def misplace_padding(tree: dict[str, Any]) -> None:
    """As if the zero at the end of the vector stood at its front."""
    for index, held in enumerate(tree["single_partition_of_fp32_groups"]):
        tree["single_partition_of_fp32_groups"][index] = torch.cat([torch.zeros(1), held[:-1]])


def misplace_moments(tree: dict[str, Any]) -> None:
    state = tree["base_optimizer_state"]["state"][1]
    state["exp_avg"] = torch.cat([torch.zeros(1), state["exp_avg"][:-1]])


@pytest.fixture(scope="module")
def converted(fixture_dir: Fixtures, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("controls") / "zero2"
    ckptkit.convert(truth_of(fixture_dir("zero3")).path, out, to="zero2", world_size=1)
    return out


@pytest.mark.parametrize(
    "fault", [swap_moments, step_off_by_one, exchange_weight_decay, misplace_padding, misplace_moments, None]
)
def test_a_fault_changes_the_losses(
    fault: Callable[[dict[str, Any]], None] | None, converted: Path, fixture_dir: Fixtures, pool: Pool, tmp_path: Path
) -> None:
    truth = truth_of(fixture_dir("zero3"))
    path = copy_of(converted, tmp_path / "copy")
    if fault is not None:
        edit_optims(path, fault)
    resumed = run(pool, truth, path, "zero2", 1)
    equal = gap(resumed.losses, losses_after(truth)) < BOUNDS["fp32"]
    assert equal == (fault is None)


def test_a_rank_of_another_step_changes_the_losses(fixture_dir: Fixtures, pool: Pool, tmp_path: Path) -> None:
    """DeepSpeed loads it without complaint; ckptkit refuses to read it (test_zero_read)."""
    truth = truth_of(fixture_dir("zero2"))
    later = tmp_path / "later"
    pool.run("tests.formats.zero_jobs:train_on", world_size=2, strategy="zero2", path=str(truth.path), out=str(later))
    mixed = copy_of(truth.path, tmp_path / "mixed")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tag_of(mixed) / name).write_bytes((tag_of(later) / name).read_bytes())
    resumed = pool.run(JOB, world_size=2, strategy="zero2", path=str(mixed), gather=False)[0]
    assert gap(resumed.losses, losses_after(truth)) > BOUNDS["fp32"]


# DeepSpeed's own tools, and its objects.


@pytest.mark.parametrize("target", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("source", ["zero3", "zero2-bf16"])
def test_zero_to_fp32_reads_it(source: str, target: str, fixture_dir: Fixtures, tmp_path: Path) -> None:
    tool = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    truth = truth_of(fixture_dir(source))
    ckptkit.convert(truth.path, tmp_path / "out", to=target, world_size=3)
    weights = tool.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "out"))
    best = {fqn: tensor for (fqn, slot), tensor in truth.best().items() if slot == "value"}
    for name, tensor in weights.items():
        expected = best[truth.info["aliases"].get(name, name)]
        assert torch.equal(tensor, expected.to(tensor.dtype)), name
    assert set(weights) == {*best, *truth.info["aliases"]}, "frozen parameters too, which DeepSpeed's own ZeRO-1 drops"


def test_ds_to_universal_reads_it(fixture_dir: Fixtures, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed.checkpoint.ds_to_universal")
    from tests.formats.zero_jobs import to_universal

    truth = truth_of(fixture_dir("zero3"))
    ckptkit.convert(truth.path, tmp_path / "out", to="zero2", world_size=3)
    to_universal(tmp_path / "out", tmp_path / "universal")
    assert ckptkit.diff(truth.path, tmp_path / "universal").differences == ()


@pytest.mark.parametrize("kind", ["DynamicLossScaler", "LossScaler"])
@pytest.mark.parametrize("target", ["zero0", "zero2", "zero3"])
def test_fp16_keeps_its_loss_scaler(kind: str, target: str, fixture_dir: Fixtures, tmp_path: Path) -> None:
    from .test_zero_read import as_fp16

    source = as_fp16(copy_of(truth_of(fixture_dir("zero2-bf16")).path, tmp_path / "source"), kind)
    ckptkit.convert(source, tmp_path / "out", to=target, world_size=3)
    assert not [name for name in (tmp_path / "out").glob("*/*") if name.name.startswith("bf16_")]
    if target != "zero0":
        assert ckptkit.diff(source, tmp_path / "out").differences == ()
        (file,) = tag_of(tmp_path / "out").glob("zero_pp_rank_2_*_optim_states.pt")
        held = torch.load(file, weights_only=False)["optimizer_state_dict"]
        (original,) = tag_of(source).glob("zero_pp_rank_1_*_optim_states.pt")
        expected = torch.load(original, weights_only=False)["optimizer_state_dict"]["loss_scaler"]
        assert type(held["loss_scaler"]) is type(expected) and vars(held["loss_scaler"]) == vars(expected)
        assert held["dynamic_loss_scale"] is expected.dynamic
    else:
        (file,) = tag_of(tmp_path / "out").glob("mp_rank_00_model_states.pt")
        held = torch.load(file, weights_only=False)["optimizer"]
        assert (held["cur_scale"], held["dynamic_loss_scale"]) == (4096.0, kind == "DynamicLossScaler")


def test_a_grad_scaler_goes_on_in_deepspeed(fixture_dir: Fixtures, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("ddp-full"))
    raw = torch.load(truth.path, weights_only=False)
    raw["scaler"] = {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 50,
        "_growth_tracker": 2,
    }
    torch.save(raw, tmp_path / "source.pt")
    ckptkit.convert(tmp_path / "source.pt", tmp_path / "out", to="zero2", world_size=2, dtype="fp16", model=truth.model)
    (file,) = tag_of(tmp_path / "out").glob("zero_pp_rank_1_*_optim_states.pt")
    scaler = torch.load(file, weights_only=False)["optimizer_state_dict"]["loss_scaler"]
    assert (scaler.cur_scale, scaler.scale_window) == (512.0, 50)
    for _ in range(48):
        assert scaler.cur_scale == 512.0
        scaler.update_scale(False)
    # 2 steps were behind it: after 48 more it has seen 50, and the next one doubles the scale.
    scaler.update_scale(False)
    assert scaler.cur_scale == 1024.0
    assert ckptkit.open(tmp_path / "out").extras["scaler"] == raw["scaler"]


# What cannot be held, and what is not clear.


def test_the_stage_must_be_named(fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = truth_of(fixture_dir("zero2")).path
    with pytest.raises(UsageError, match="which stage"):
        ckptkit.convert(path, tmp_path / "out", to="zero")
    ckptkit.convert(path, tmp_path / "out", to="zero", world_size=1, ds_config=zero(3))
    assert ckptkit.open(tmp_path / "out").world_size == 1
    with pytest.raises(UsageError, match="stage 3"):
        ckptkit.convert(path, tmp_path / "other", to="zero1", ds_config=zero(3))


def test_the_precision_must_be_the_configurations(fixture_dir: Fixtures, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dtype bfloat16"):
        try:
            ckptkit.convert(truth_of(fixture_dir("zero2")).path, tmp_path / "out", to="zero1", ds_config=BF16)
        except UsageError as error:
            raise UsageError(str(error)) from error
    with pytest.raises(UsageError, match="float32"):
        ckptkit.convert(truth_of(fixture_dir("zero2-bf16")).path, tmp_path / "out", to="zero1", ds_config=zero(1))


def test_parameters_without_dimensions_are_drops(fixture_dir: Fixtures, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("ddp-full-scalar"))
    with pytest.raises(LossError, match="would not be in the target") as caught:
        ckptkit.convert(truth.path, tmp_path / "out", to="zero2", world_size=2, model=truth.model)
    scalars = [fqn for (fqn, slot), t in truth.tensors.items() if slot == "exp_avg" and not t.shape]
    assert scalars and all(any(name in fault for fault in caught.value.faults) for name in scalars)
    ckptkit.convert(truth.path, tmp_path / "out", to="zero2", world_size=2, model=truth.model, allow_drop=True)
    assert torch.equal(ckptkit.open(tmp_path / "out").read(scalars[0]), truth.tensors[scalars[0], "value"])


def test_steps_that_differ_within_a_group_are_drops(fixture_dir: Fixtures, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("ddp-full"))
    raw = torch.load(truth.path, weights_only=False)
    raw["optimizer"]["state"][4]["step"] -= 2
    torch.save(raw, tmp_path / "source.pt")
    with pytest.raises(LossError) as caught:
        ckptkit.convert(tmp_path / "source.pt", tmp_path / "out", to="zero3", world_size=2, model=truth.model)
    (fault,) = caught.value.faults
    assert "[step]" in fault and "one step for a group: 3.0, where this one is 1.0" in fault


def test_states_of_other_shapes_are_drops(fixture_dir: Fixtures, tmp_path: Path) -> None:
    """Adafactor's row and column factors, say: ZeRO's vectors hold what has the parameter's own shape."""
    truth = truth_of(fixture_dir("ddp-full"))
    raw = torch.load(truth.path, weights_only=False)
    raw["optimizer"]["state"][3]["exp_avg_sq_row"] = torch.ones(7)
    torch.save(raw, tmp_path / "source.pt")
    with pytest.raises(LossError) as caught:
        ckptkit.convert(tmp_path / "source.pt", tmp_path / "out", to="zero2", world_size=2, model=truth.model)
    assert len(caught.value.faults) == 1 and "exp_avg_sq_row" in caught.value.faults[0]
    ckptkit.convert(tmp_path / "source.pt", tmp_path / "out", to="zero0", model=truth.model)


def test_lists_of_tensors_in_a_state_are_drops(fixture_dir: Fixtures, tmp_path: Path) -> None:
    """SOAP's preconditioners, say: each parameter has its own, and a group of ZeRO has one value."""
    truth = truth_of(fixture_dir("ddp-full"))
    raw = torch.load(truth.path, weights_only=False)
    raw["optimizer"]["state"][3]["GG"] = [torch.ones(7, 7), torch.ones(5, 5)]
    torch.save(raw, tmp_path / "source.pt")
    with pytest.raises(LossError) as caught:
        ckptkit.convert(tmp_path / "source.pt", tmp_path / "out", to="zero2", world_size=2, model=truth.model)
    assert len(caught.value.faults) == 1 and "[GG]" in caught.value.faults[0]
    ckptkit.convert(
        tmp_path / "source.pt", tmp_path / "out", to="zero2", world_size=2, model=truth.model, allow_drop=True
    )


def test_weights_only_says_how_to_load(fixture_dir: Fixtures, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("zero3"))
    report = ckptkit.convert(truth.path, tmp_path / "out", to="zero2", world_size=2, weights_only=True)
    assert any("load_optimizer_states=False" in text for text in report.plan.warnings)


def test_the_same_source_gives_the_same_bytes(fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = truth_of(fixture_dir("zero3")).path
    for name in ("a", "b"):
        ckptkit.convert(path, tmp_path / name, to="zero2", world_size=3)
    names = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(names) == 5
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8}}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("target", "config", "kind"),
    [
        ("zero2", {**ADAM, **zero(2)}, "FusedAdam"),
        ("zero3", {**ADAM, **zero(3)}, "FusedAdam"),
        ("zero0", {**ADAM, **zero(0)}, "FusedAdam"),
        ("zero2", {**ADAM, **zero(2, **OFFLOAD)}, "DeepSpeedCPUAdam"),
        ("zero3", {**ADAM, **zero(3, **OFFLOAD)}, "DeepSpeedCPUAdam"),
    ],
)
def test_deepspeeds_own_adam_goes_on(
    target: str, config: dict[str, Any], kind: str, fixture_dir: Fixtures, pool: Pool, tmp_path: Path
) -> None:
    """It counts steps in integers and wants `bias_correction`, neither of which a run with torch's AdamW has."""
    truth = truth_of(fixture_dir("ddp-full"))
    ckptkit.convert(truth.path, tmp_path / "out", to=target, world_size=2, ds_config=config, model=truth.model)
    answer = pool.run(
        "tests.formats.zero_jobs:resume_own_adam", world_size=2, path=str(tmp_path / "out"), config=config
    )[0]  # fmt: skip
    name, begin, decays, losses, end = answer
    # Without ZeRO, FusedAdam counts in the state of a group's last parameter alone.
    assert (name, begin, decays, end) == (kind, [3], [0.1, 0.0], [3, 6] if target == "zero0" else [6])
    # Another implementation of Adam rounds differently.
    assert gap(losses, losses_after(truth)) < 1e-5


@pytest.mark.parametrize("target", ["zero1", "zero3"])
def test_an_fp16_engine_takes_it(target: str, fixture_dir: Fixtures, pool: Pool, tmp_path: Path) -> None:
    from .test_zero_read import as_fp16

    truth = truth_of(fixture_dir("zero2-bf16"))
    source = as_fp16(copy_of(truth.path, tmp_path / "source"), "DynamicLossScaler")
    ckptkit.convert(source, tmp_path / "out", to=target, world_size=3)
    path = str(tmp_path / "out")
    held = pool.run("tests.formats.zero_jobs:load_fp16", world_size=3, path=path, stage=int(target[-1]))[0]
    assert (held["scaler"]["cur_scale"], held["scaler"]["cur_iter"], held["scaler"]["delayed_shift"]) == (4096.0, 9, 2)
    for (fqn, slot), tensor in truth.tensors.items():
        if slot != "value":
            assert torch.equal(held["tensors"][fqn, slot], tensor), (fqn, slot)
        elif (fqn, "master") in truth.tensors:
            assert torch.equal(held["tensors"][fqn, slot], truth.tensors[fqn, "master"].half()), fqn
