"""What counts as a difference: bounds by step and kind, tensors, noise, and what must never count as equal."""

from __future__ import annotations

import math

import pytest
import torch

from ckptkit.errors import UsageError
from ckptkit.verify.compare import compare, relative
from ckptkit.verify.diagnosis import diagnose
from ckptkit.verify.summary import summarize_all
from ckptkit.verify.tolerance import BF16, FP32, tolerance_for
from ckptkit.verify.trace import StepRecord, Trace


def trace(losses, *, norms=None, initial=None, first=None, final=None, optimizer=None) -> Trace:
    norms = norms or [1.0] * len(losses)
    steps = tuple(StepRecord(i, loss, norm, (0.1,)) for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)))
    parts = {"initial": initial, "after_first": first, "final": final, "optimizer": optimizer}
    return Trace("t", "t", 1, "fp32", steps, **{k: summarize_all(v) for k, v in parts.items() if v is not None})


def verdict(a: Trace, b: Trace, bounds=FP32) -> str:
    return compare(a, b, bounds).verdict


def test_the_first_steps_are_bound_tightly_and_later_ones_as_torch_does():
    right = trace([2.0] * 6)
    for step, off, expected in [(0, 1e-6, "equal"), (0, 4e-6, "mismatch"), (4, 4e-6, "equal"), (4, 2e-5, "mismatch")]:
        losses = [2.0] * 6
        losses[step] += off
        assert verdict(right, trace(losses)) == expected, (step, off)


def test_bf16_has_bounds_of_its_own_and_an_override_replaces_them():
    right, near, far = trace([2.0] * 5), trace([2.0, 2.0, 2.0, 2.0, 2.009]), trace([2.0, 2.0, 2.0, 2.0, 2.011])
    assert verdict(right, near, BF16) == "equal" and verdict(right, far, BF16) == "mismatch"
    assert verdict(right, near, FP32) == "mismatch"
    assert verdict(right, far, tolerance_for("fp32", 0.01)) == "equal"
    assert verdict(right, near, tolerance_for("bf16", 0.0)) == "mismatch"
    assert "0.01" in tolerance_for("fp32", 0.01).describe()
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError):
            tolerance_for("fp32", bad)
    with pytest.raises(UsageError):
        tolerance_for("int4")


def test_gradient_norms_have_their_own_bound():
    right = trace([2.0, 1.0], norms=[1.0, 1.0])
    assert verdict(right, trace([2.0, 1.0], norms=[1.0 + 5e-5, 1.0])) == "equal"
    assert verdict(right, trace([2.0, 1.0], norms=[1.0 + 5e-4, 1.0])) == "mismatch"
    assert verdict(right, trace([2.0, 1.0], norms=[None, None])) == "equal"  # not every strategy tells
    assert verdict(trace([0.0], norms=[0.0]), trace([0.0], norms=[0.0])) == "equal"


def test_nan_is_never_equal_not_even_to_itself():
    bad = trace([2.0, math.nan])
    assert verdict(bad, bad) == "mismatch" and relative(math.nan, math.nan) == math.inf
    bad = trace([2.0, 1.0], norms=[1.0, math.inf])
    assert verdict(bad, bad) == "mismatch"
    weights = {"w": torch.tensor([1.0, math.nan])}
    same = trace([1.0], initial=weights, final=weights)
    other = trace([1.0], initial=weights, final={"w": torch.tensor([2.0, math.nan])})
    assert verdict(same, other) == "mismatch"


def test_a_weight_that_moved_counts_even_if_the_losses_are_equal():
    """A parameter without a gradient, moved by momentum or decay because it got zeros: no loss shows it."""
    start = {"used": torch.ones(8), "unused": torch.ones(8)}
    right = {"used": torch.full((8,), 0.9), "unused": torch.ones(8)}
    wrong = {"used": torch.full((8,), 0.9), "unused": torch.full((8,), 0.99)}
    ours = trace([2.0, 1.0], initial=start, first=right, final=right)
    comparison = compare(ours, trace([2.0, 1.0], initial=start, first=wrong, final=wrong), FP32)
    assert comparison.verdict == "mismatch" and not comparison.deviations
    assert [item.name for item in comparison.tensors] == ["unused"]
    assert diagnose(comparison).cause == "other trained parameters"


def test_missing_extra_and_reshaped_tensors_count():
    start = {"a": torch.ones(4), "b": torch.ones(2, 2)}
    right = trace([1.0], initial=start, final=start)
    for other in ({"a": torch.ones(4)}, {**start, "c": torch.ones(1)}, {**start, "b": torch.ones(4)}):
        assert verdict(right, trace([1.0], initial=other, final=other)) == "mismatch"


def test_noise_that_adam_blows_up_does_not_count_and_real_gradients_do():
    start = {"w": torch.zeros(8), "noise": torch.zeros(8)}
    states = {"w:exp_avg": torch.ones(8), "noise:exp_avg": torch.full((8,), 1e-9)}
    right = trace([1.0], initial=start, final={"w": torch.ones(8), "noise": torch.ones(8)}, optimizer=states)
    flipped = trace([1.0], initial=start, final={"w": torch.ones(8), "noise": -torch.ones(8)}, optimizer=states)
    assert verdict(right, flipped) == "equal"
    wrong = trace([1.0], initial=start, final={"w": -torch.ones(8), "noise": torch.ones(8)}, optimizer=states)
    assert verdict(right, wrong) == "mismatch"


def test_a_lost_optimizer_state_counts():
    weights = {"w": torch.ones(4)}
    right = trace([1.0], initial=weights, final=weights, optimizer={"w:exp_avg": torch.ones(4)})
    wrong = trace([1.0], initial=weights, final=weights, optimizer={"w:exp_avg": torch.full((4,), 1.1)})
    assert verdict(right, wrong) == "mismatch"
