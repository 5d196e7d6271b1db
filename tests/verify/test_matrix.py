"""Strategies form: every strategy of the list really runs and equals a single process; what is missing never passes."""

from __future__ import annotations

import pytest

from ckptkit.errors import Exit, UsageError
from ckptkit.verify.matrix import DEFAULT_OPTIMIZERS, DEFAULT_PRECISIONS, device_notes, verify_strategies
from ckptkit.verify.options import MatrixOptions

TORCH = {
    "ddp", "fsdp1", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp1-hybrid", "fsdp2", "fsdp2-no-reshard", "fsdp2-hybrid",
}  # fmt: skip
ZERO = {"zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"}


@pytest.mark.slow
def test_all_strategies_equal_a_single_process():
    pytest.importorskip("deepspeed")
    options = MatrixOptions(precisions=("fp32",), optimizers=("sgd",), steps=5, device="cpu")
    report = verify_strategies(options)
    assert {f.comparison.candidate.strategy for f in report.findings} == TORCH | ZERO
    for finding in report.findings:
        c = finding.comparison
        assert c.verdict == "equal", (finding.label, finding.reason, finding.diagnosis)
        assert len(c.candidate.steps) == len(c.reference.steps) == 5
        assert c.candidate.initial.keys() == c.reference.initial.keys() and c.candidate.optimizer
        assert c.candidate.losses[0] != c.candidate.losses[1]
    assert report.exit_code == Exit.OK
    assert report.environment["world size"] == "2" and report.findings[0].group == "fp32 · sgd, clip 0.5"


@pytest.mark.slow
def test_bf16_stays_within_its_bounds_and_is_not_fp32():
    options = MatrixOptions(("fsdp2", "fsdp1"), precisions=("bf16",), optimizers=("adamw",), steps=5, device="cpu")
    report = verify_strategies(options)
    assert report.ok, report.findings
    assert 0 < report.findings[0].comparison.largest_loss_difference < 5e-3
    strict = verify_strategies(
        MatrixOptions(("fsdp2",), precisions=("bf16",), optimizers=("adamw",), steps=3, device="cpu", tolerance=1e-9)
    )
    assert strict.exit_code == Exit.FINDINGS, "the control: a bound that bf16 cannot keep"


@pytest.mark.slow
def test_a_missing_package_is_not_run_and_not_ok(monkeypatch):
    import importlib.util

    from ckptkit.verify import runner
    from ckptkit.verify.strategies import zero

    # The pool's processes import for themselves, so the strategy is asked here, where it can be told.
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "deepspeed" else find(name, *a))

    class Here:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def run(self, function, *, world_size, name, workload, options, steps):
            zero.STRATEGIES[0].build(workload, options)
            raise AssertionError("built without its package")

    trace = runner.run_one(Here(), "zero1", MatrixOptions() and runner.Workload(), runner.Options(), 2, 3)
    assert trace.status == "not run" and "deepspeed" in trace.reason


def test_the_default_run_has_sgd_with_clipping_and_both_precisions():
    assert DEFAULT_PRECISIONS == ("fp32", "bf16")
    assert any(name == "sgd" and clip for name, clip in DEFAULT_OPTIMIZERS)


def test_one_rank_says_what_it_cannot_show():
    assert "cannot show that ranks agree" in device_notes("cuda", 1)[0]
    assert device_notes("cuda", 2) == ()


@pytest.mark.parametrize(
    "options",
    [MatrixOptions(("nosuch",)), MatrixOptions(model="a:b"), MatrixOptions(batch="a:b"), MatrixOptions(tolerance=-1.0)],
)
def test_what_cannot_be_asked_is_a_usage_error(options):
    with pytest.raises(UsageError):
        verify_strategies(options)
