"""State form: a conversion goes on with the losses of its source; one that lost something is caught and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.errors import Exit, SourceError, UsageError
from ckptkit.verify.options import MatrixOptions
from ckptkit.verify.state import verify_state

pytestmark = pytest.mark.slow
OPTIONS = MatrixOptions(steps=4, device="cpu")
MODEL = "ckptkit.verify.default_model:default_model"


def test_a_zero_checkpoint_goes_on_as_fsdp2(fixture_dir: Callable[[str], Path]) -> None:
    pytest.importorskip("deepspeed")
    report = verify_state(fixture_dir("zero2") / "ckpt", None, OPTIONS)
    (finding,) = report.findings
    assert report.exit_code == Exit.OK, (finding.reason, finding.diagnosis)
    assert finding.comparison.reference.strategy == "zero2" and finding.comparison.candidate.strategy == "fsdp2"
    assert finding.comparison.largest_loss_difference <= 1e-6
    assert any("read by zero2's own API" in note for note in report.notes)


def test_a_dcp_checkpoint_goes_on_as_ddp_and_as_zero3(fixture_dir: Callable[[str], Path]) -> None:
    source = fixture_dir("fsdp2-dcp") / "ckpt"
    for strategy in ("ddp", "zero3"):
        if strategy == "zero3":
            pytest.importorskip("deepspeed")
        report = verify_state(source, None, MatrixOptions(steps=3, device="cpu"), to=strategy)
        assert report.ok, (report.findings[0].reason, report.findings[0].diagnosis)
        assert any(f"read by {strategy}'s own API" in note for note in report.notes)


DAMAGES = {"step": "step counter reset", "moments": "moments not restored", "weights": "other starting weights"}


@pytest.mark.parametrize(("damage", "cause"), DAMAGES.items())
def test_a_conversion_that_lost_something_is_caught(
    damage: str, cause: str, fixture_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    source = fixture_dir("fsdp2-dcp") / "ckpt"
    out = tmp_path / "converted.pt"
    ckptkit.convert(source, out, to="full", optimizer_keys="id", model=MODEL)
    content = torch.load(out, weights_only=False)
    for state in content["optimizer"]["state"].values():
        if damage == "step":
            state["step"].zero_()
        if damage == "moments":
            state["exp_avg"].zero_()
    if damage == "weights":
        name = "blocks.0.up.weight"
        content["model"][name][[0, 1]] = content["model"][name][[1, 0]]
    torch.save(content, out)
    report = verify_state(source, out, MatrixOptions(steps=3, device="cpu"), to="ddp")
    (finding,) = report.findings
    assert report.exit_code == Exit.FINDINGS and finding.comparison.verdict == "mismatch"
    assert finding.diagnosis.cause == cause


def test_what_cannot_be_resumed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        verify_state(tmp_path / "nothing", None, OPTIONS)
    with pytest.raises(UsageError):
        verify_state(tmp_path / "nothing", None, MatrixOptions(strategies=("a", "b")))
