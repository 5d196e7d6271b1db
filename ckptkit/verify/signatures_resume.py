"""Signatures of a resume that lost something: moments, the step counter, or the rest of the steps."""

from __future__ import annotations

from .cause import Diagnosis
from .compare import Comparison, tensor_differences
from .trace import Trace
from .updates import first_gradient_is_right


def step_counter(c: Comparison) -> Diagnosis | None:
    counts = _counts(c.reference), _counts(c.candidate)
    name = next((n for n, count in counts[0].items() if n in counts[1] and counts[1][n] != count), None)
    if name is None:
        return None
    states = tensor_differences(
        c.reference.optimizer_first, c.candidate.optimizer_first, "optimizer_first", common_only=True
    )
    moments = [d for d in states if not d.name.endswith((":step", ":master")) and d.relative > 1e-4]
    numbers = f"step of {name} is {counts[1][name]:g} after the first step, and should be {counts[0][name]:g}"
    if moments:
        return _moments_lost(f"{numbers}; {moments[0].describe()}")
    return Diagnosis(
        "step counter reset",
        "the moments were restored and Adam's step counter was not: bias correction starts anew",
        numbers,
        "carry the `step` of every parameter's optimizer state into the target",
    )


def moments(c: Comparison) -> Diagnosis | None:
    """The first update differs though weights, batch and gradient agree, and the state after it differs as well."""
    if not first_gradient_is_right(c):
        return None
    states = tensor_differences(
        c.reference.optimizer_first, c.candidate.optimizer_first, "optimizer_first", common_only=True
    )
    moments = [d for d in states if not d.name.endswith((":step", ":master")) and d.relative > 1e-3]
    if moments:
        worst = max(moments, key=lambda d: d.relative)
        return _moments_lost(f"the first gradient is right; {len(moments)} states differ, worst {worst.describe()}")
    return None


def _moments_lost(evidence: str) -> Diagnosis:
    return Diagnosis(
        "moments not restored",
        "the optimizer starts with other moments than the checkpoint holds",
        evidence,
        "load the optimizer's state after it was built on the sharded parameters, with keys that match (FQNs against "
        "integers); a missing key is skipped silently by some loaders",
    )


def _counts(trace: Trace) -> dict[str, float]:
    return {
        n.removesuffix(":step"): s.sample[0]
        for n, s in trace.optimizer_first.items()
        if n.endswith(":step") and s.sample
    }


def stopped_early(c: Comparison) -> Diagnosis | None:
    if c.missing_steps <= 0 or c.deviations:
        return None
    done, wanted = len(c.candidate.steps), len(c.reference.steps)
    return Diagnosis(
        "stopped early",
        f"the candidate made {done} of {wanted} optimizer steps",
        "the steps that it made match",
        "compare the number of batches, gradient accumulation and the condition that ends the loop",
    )
