"""Every planted fault, trained for real on two ranks, is caught and named; right runs are equal to the last bit."""

import dataclasses
import math

import pytest

from ckptkit.verify.compare import compare
from ckptkit.verify.diagnosis import diagnose
from ckptkit.verify.tolerance import FP32
from ckptkit.verify.trace import StepRecord, Trace

from .faults import FAULTS, all_traces

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def traces():
    return all_traces()


def test_ten_causes_are_covered():
    assert len({cause for _, cause in FAULTS.values()}) >= 10


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_named(traces, fault):
    kind, cause = FAULTS[fault]
    comparison = compare(traces["right"][kind], traces["faulty"][fault], FP32)
    assert comparison.verdict == "mismatch"
    found = diagnose(comparison)
    assert found is not None and found.cause == cause, found
    assert found.evidence and found.remedy


def test_a_run_without_fault_is_equal_and_has_no_diagnosis(traces):
    comparison = compare(traces["right"]["sgd"], traces["again"]["sgd"], FP32)
    assert comparison.verdict == "equal" and comparison.bit_equal
    assert comparison.largest_loss_difference == 0.0
    assert diagnose(comparison) is None


def test_the_first_differing_tensor_is_named(traces):
    comparison = compare(traces["right"]["sgd"], traces["faulty"]["one group's weight decay"], FP32)
    assert comparison.first_tensors[0].moment == "after_first"
    assert {d.name for d in comparison.first_tensors} <= {
        n for n, s in comparison.reference.initial.items() if len(s.shape) > 1
    }


def test_a_non_finite_loss_never_counts_as_equal(traces):
    right = traces["right"]["sgd"]
    for bad in (math.nan, math.inf):
        steps = (*right.steps[:-1], dataclasses.replace(right.steps[-1], loss=bad))
        broken = dataclasses.replace(right, steps=steps)
        comparison = compare(broken, broken, FP32)
        assert comparison.verdict == "mismatch" and not math.isfinite(comparison.largest_loss_difference)
        assert diagnose(comparison).cause == "not finite"


def test_an_empty_or_shorter_run_is_not_equal(traces):
    right = traces["right"]["sgd"]
    assert compare(Trace("a", "a", 1, "fp32"), Trace("b", "b", 1, "fp32"), FP32).verdict == "mismatch"
    short = dataclasses.replace(right, steps=right.steps[:3], final={}, optimizer={})
    comparison = compare(right, short, FP32)
    assert comparison.verdict == "mismatch" and diagnose(comparison).cause == "stopped early"


def test_what_did_not_run_is_never_equal():
    ran = Trace("a", "a", 1, "fp32", steps=(StepRecord(0, 1.0),))
    missing = Trace.not_run("zero1", "zero1", "deepspeed is not installed")
    assert compare(ran, missing, FP32).verdict == "not run"
    assert compare(ran, Trace.failed("x", "x", "boom"), FP32).verdict == "failed"
    assert diagnose(compare(ran, missing, FP32)) is None
