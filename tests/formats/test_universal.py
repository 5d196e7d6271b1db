"""universal: both forms read; what is written loads with `load_universal`; what DeepSpeed leaves out is said before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.transform import same_value
from ckptkit.errors import LossError, SourceError, UnsafePickleError
from ckptkit.verify.pool import Pool
from tests.truth import Truth, differences, truth_of

from .test_zero_read import Evil
from .test_zero_write import BOUNDS, gap, losses_after, precision
from .zero_edit import copy_of, edit, tag_of
from .zero_jobs import Resumed

pytestmark = pytest.mark.slow
Fixtures = Callable[[str], Path]
JOB = "tests.formats.zero_jobs:resume"


def run(pool: Pool, truth: Truth, out: Path, strategy: str, ranks: int, *, repair: bool = False) -> Resumed:
    options = {key: value for key, value in truth.info["options"].items() if key != "details"}
    more = {"repair": str(truth.folder / "truth.pt")} if repair else {}
    return pool.run(JOB, world_size=ranks, strategy=strategy, path=str(out), options=options, form="universal", **more)[
        0
    ]


def left_alone(truth: Truth) -> set[str]:
    """What DeepSpeed does not restore from a universal checkpoint: buffers and frozen parameters."""
    return {*truth.info["buffers"], *truth.info["frozen"]}


@pytest.mark.parametrize("name", ["universal-zero2", "universal-zero3-bf16"])
def test_a_run_and_its_tag_read_the_same(name: str, fixture_dir: Fixtures) -> None:
    truth = truth_of(fixture_dir(name))
    for path in (truth.path, tag_of(truth.path)):
        checkpoint = ckptkit.open(path)
        assert checkpoint.format == "universal"
        assert differences(checkpoint, truth) == []
        assert checkpoint.extras["note"]["tokens_seen"] == 396


def test_the_model_files_give_what_the_folders_round(fixture_dir: Fixtures) -> None:
    """DeepSpeed writes an fp32.pt for buffers too, which rounds 2**40 + 6; the model file has it whole."""
    truth = truth_of(fixture_dir("universal-zero1"))
    rounded = torch.load(tag_of(truth.path) / "zero" / "calls" / "fp32.pt", weights_only=True)["param"]
    assert rounded.dtype == torch.float32 and int(rounded[0]) != 2**40 + 6
    assert int(ckptkit.open(truth.path).read("calls")[0]) == 2**40 + 6


def test_a_run_with_both_pointers_is_two_formats(fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = copy_of(truth_of(fixture_dir("zero2")).path, tmp_path / "run")
    copy_of(tag_of(truth_of(fixture_dir("universal-zero2")).path), path / "global_step3_universal")
    (path / "latest_universal").write_text("global_step3_universal")
    with pytest.raises(SourceError, match="two formats") as caught:
        ckptkit.open(path)
    assert "universal" in caught.value.what and "zero" in caught.value.what
    assert ckptkit.open(path, "universal").format == "universal"
    assert ckptkit.open(path, "zero").format == "zero"


def test_every_missing_parameter_is_named(fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = copy_of(truth_of(fixture_dir("universal-zero1")).path, tmp_path / "copy")
    for name in ("norm.weight", "blocks.1.up.bias"):
        (tag_of(path) / "zero" / name / "fp32.pt").unlink()
    with pytest.raises(SourceError) as caught:
        ckptkit.open(path)
    assert sorted(caught.value.faults) == ["blocks.1.up.bias has no fp32.pt", "norm.weight has no fp32.pt"]


def test_a_parameter_of_another_shape_is_refused(fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = copy_of(truth_of(fixture_dir("universal-zero1")).path, tmp_path / "copy")
    edit(tag_of(path) / "zero" / "norm.weight" / "exp_avg.pt", lambda tree: {"param": tree["param"][:-1].clone()})
    with pytest.raises(SourceError, match="cannot be read") as caught:
        ckptkit.open(path)
    assert "(34,), not (35,)" in caught.value.faults[0]


def test_a_truncated_file_is_a_source_error(fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = copy_of(truth_of(fixture_dir("universal-zero3")).path, tmp_path / "copy")
    os.truncate(tag_of(path) / "zero" / "norm.weight" / "exp_avg.pt", 600)
    with pytest.raises(SourceError) as caught:
        ckptkit.open(path)
    assert "exp_avg.pt" in str(caught.value)


@pytest.mark.parametrize(
    "file", ["zero/norm.weight/exp_avg.pt", "zero/optimizer_state.pt", "mp_rank_00_model_states.pt"]
)
def test_a_crafted_pickle_runs_nothing(file: str, fixture_dir: Fixtures, tmp_path: Path) -> None:
    path, mark = copy_of(truth_of(fixture_dir("universal-zero1")).path, tmp_path / "copy"), tmp_path / "ran"
    edit(tag_of(path) / file, lambda tree: tree.update(more=Evil(mark)))
    with pytest.raises(UnsafePickleError, match="system"):
        ckptkit.open(path)
    assert not mark.exists()


@pytest.mark.parametrize("pointer", ["../x", "/etc"])
def test_a_pointer_out_of_the_folder_is_refused(pointer: str, fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = copy_of(truth_of(fixture_dir("universal-zero1")).path, tmp_path / "copy")
    (path / "latest_universal").write_text(pointer)
    with pytest.raises(SourceError, match="points to"):
        ckptkit.open(path)


@pytest.mark.parametrize(
    ("source", "target", "strategy", "ranks"),
    [
        ("zero3", "universal", "zero2", 3),
        ("zero2", "universal", "zero1", 1),
        ("zero3-bf16", "universal", "zero2", 3),
        ("zero1-sgd", "universal", "zero1", 3),
        ("zero2", "universal3", "zero3", 3),
        ("zero1-bf16", "universal3", "zero3", 1),
    ],
)
def test_an_engine_loads_it(
    source: str, target: str, strategy: str, ranks: int, fixture_dir: Fixtures, pool: Pool, tmp_path: Path
) -> None:
    """Everything but what DeepSpeed leaves alone, which is what the plan said."""
    truth = truth_of(fixture_dir(source))
    report = ckptkit.convert(truth.path, tmp_path / "out", to=target, world_size=ranks)
    resumed = run(pool, truth, tmp_path / "out", strategy, ranks, repair=True)
    held = resumed.state.tensors
    different = {key for key, t in truth.tensors.items() if key not in held or not torch.equal(held[key], t)}
    assert {fqn for fqn, _ in different} <= left_alone(truth)
    assert resumed.global_steps == 3 and resumed.client["note"]["tokens_seen"] == 396
    groups = truth.info["param_groups"]
    if target == "universal":
        assert same_value(resumed.state.groups, groups)
        # With buffers and frozen parameters set by hand the run goes on; ZeRO 3 has lost its groups.
        assert gap(resumed.losses, losses_after(truth)) < BOUNDS[precision(truth)]
    said = "\n".join(report.plan.warnings)
    assert f"{len(truth.info['buffers'])} buffers and {len(truth.info['frozen'])} frozen parameters" in said
    assert ("hyper-parameters of the first" in said) == (target == "universal3")


def test_the_warnings_are_true(fixture_dir: Fixtures, pool: Pool, tmp_path: Path) -> None:
    """The control: DeepSpeed (0.19.8) really leaves these alone; when it no longer does, the warnings are to go."""
    truth = truth_of(fixture_dir("zero2"))
    report = ckptkit.convert(truth.path, tmp_path / "out", to="universal3", world_size=2)
    resumed = run(pool, truth, tmp_path / "out", "zero3", 2)
    held = resumed.state.tensors
    different = {fqn for (fqn, slot), t in truth.tensors.items() if not torch.equal(held[fqn, slot], t)}
    assert different >= {"calls", "frozen.weight"}
    decays = [group["weight_decay"] for group in resumed.state.groups]
    assert decays == [truth.info["param_groups"][0]["weight_decay"]] * 2
    assert gap(resumed.losses, losses_after(truth)) > BOUNDS["fp32"]
    assert set(resumed.steps.values()) == {3.0 + 2 * 3}, "two groups share one counter, and each counts"
    assert any("one step counter for all 2 groups" in text for text in report.plan.warnings)


def test_other_states_than_adams_are_drops_at_stage_3(fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = truth_of(fixture_dir("zero1-sgd")).path
    with pytest.raises(LossError) as caught:
        ckptkit.convert(path, tmp_path / "out", to="universal3")
    assert all("momentum_buffer" in fault for fault in caught.value.faults)


@pytest.mark.parametrize("target", ["universal", "universal3"])
@pytest.mark.parametrize("source", ["zero2", "zero3-bf16", "universal-zero1", "universal-zero3"])
def test_round_trips_are_equal(source: str, target: str, fixture_dir: Fixtures, tmp_path: Path) -> None:
    path = truth_of(fixture_dir(source)).path
    ckptkit.convert(path, tmp_path / "there", to=target)
    assert ckptkit.diff(path, tmp_path / "there").differences == ()
    ckptkit.convert(tmp_path / "there", tmp_path / "back", to="zero2", world_size=3)
    assert ckptkit.diff(path, tmp_path / "back").differences == ()


def test_the_configuration_gives_the_stage(fixture_dir: Fixtures, tmp_path: Path) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    ckptkit.convert(truth_of(fixture_dir("zero2")).path, tmp_path / "out", to="universal", ds_config=config)
    assert [file.name for file in tag_of(tmp_path / "out").glob("*.pt")] == [
        "zero_pp_rank_0_mp_rank_00_model_states.pt"
    ]
