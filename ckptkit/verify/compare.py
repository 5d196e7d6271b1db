"""Two traces side by side: at which step they part, by how much, and in which tensor first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .tolerance import Tolerance
from .trace import StepRecord, Summaries, TensorSummary, Trace

Verdict = Literal["equal", "mismatch", "not run", "failed"]
Moment = Literal["initial", "after_first", "final", "optimizer_first", "optimizer"]
MOMENTS: Mapping[Moment, str] = {
    "initial": "before the first step",
    "after_first": "after the first step",
    "final": "after the last step",
    "optimizer_first": "optimizer state after the first step",
    "optimizer": "optimizer state after the last step",
}


@dataclass(frozen=True, slots=True)
class Deviation:
    """One recorded number beyond its bound. `what` is loss, grad_norm, applied_norm or lr; differences are absolute."""

    what: str
    step: int
    reference: float
    candidate: float
    allowed: float

    @property
    def difference(self) -> float:
        return abs(self.candidate - self.reference)

    @property
    def relative(self) -> float:
        return relative(self.reference, self.candidate)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that differs. `relative` is the difference of the samples over the norm of the reference's sample."""

    moment: Moment
    name: str
    kind: Literal["missing", "extra", "shape", "dtype", "values"]
    relative: float
    detail: str

    def describe(self) -> str:
        return f"{self.name} {MOMENTS[self.moment]}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that differs between a reference and a candidate, judged by `tolerance`.

    `deviations` and `tensors` hold only what is beyond the bounds, in order of time; `first_tensors` holds, worst
    first, the tensors that are not bit-equal at the earliest moment where any is off by more than rounding.
    """

    reference: Trace
    candidate: Trace
    tolerance: Tolerance
    verdict: Verdict
    deviations: tuple[Deviation, ...]
    tensors: tuple[TensorDifference, ...]
    first_tensors: tuple[TensorDifference, ...]
    missing_steps: int
    bit_equal: bool

    @property
    def loss_differences(self) -> tuple[float, ...]:
        """Relative loss difference per common step; inf where either loss is not finite."""
        return tuple(relative(a, b) for a, b in zip(self.reference.losses, self.candidate.losses, strict=False))

    @property
    def largest_loss_difference(self) -> float | None:
        return max(self.loss_differences, default=None)

    @property
    def largest_norm_difference(self) -> float | None:
        pairs = zip(self.reference.steps, self.candidate.steps, strict=False)
        return max((relative(a.grad_norm, b.grad_norm) for a, b in pairs
                    if a.grad_norm is not None and b.grad_norm is not None), default=None)  # fmt: skip

    @property
    def first(self) -> Deviation | None:
        """The first deviation in time; of one step the loss before the norms."""
        return self.deviations[0] if self.deviations else None


def relative(reference: float, candidate: float) -> float:
    """|candidate - reference| / |reference|; inf where either is not finite or a zero reference was missed."""
    if not (math.isfinite(reference) and math.isfinite(candidate)):
        return math.inf
    if reference == candidate:
        return 0.0
    return abs(candidate - reference) / abs(reference) if reference else math.inf


def compare(reference: Trace, candidate: Trace, tolerance: Tolerance) -> Comparison:
    """Compares step records at every step, weights before, after the first and after the last step, and optimizer
    states at the end. A candidate that did not run is "not run" or "failed", never equal; so is one with no steps.
    """
    if candidate.status != "ran" or reference.status != "ran":
        worst = candidate if candidate.status != "ran" else reference
        verdict: Verdict = "not run" if worst.status == "not run" else "failed"
        return Comparison(reference, candidate, tolerance, verdict, (), (), (), 0, False)
    deviations = tuple(_deviations(reference, candidate, tolerance))
    missing = len(reference.steps) - len(candidate.steps)
    tensors = tuple(_judged_tensors(reference, candidate, tolerance))
    equal = bool(reference.steps) and not deviations and not tensors and missing == 0
    return Comparison(
        reference, candidate, tolerance, "equal" if equal else "mismatch", deviations, tensors,
        _first_tensors(reference, candidate), missing, _bit_equal(reference, candidate),
    )  # fmt: skip


def tensor_differences(
    reference: Summaries, candidate: Summaries, moment: Moment, *, common_only: bool = False
) -> list[TensorDifference]:
    """All tensors that are not bit-equal, in the reference's order; `common_only` leaves out missing and extra ones."""
    found = []
    for name, ours in reference.items():
        theirs = candidate.get(name)
        if theirs is None:
            if not common_only:
                found.append(TensorDifference(moment, name, "missing", math.inf, "missing in the candidate"))
        elif not ours.same_bits(theirs):
            found.append(_difference(moment, name, ours, theirs))
    if not common_only:
        extra = (name for name in candidate if name not in reference)
        found += [TensorDifference(moment, n, "extra", math.inf, "not in the reference") for n in extra]
    return found


def _difference(moment: Moment, name: str, ours: TensorSummary, theirs: TensorSummary) -> TensorDifference:
    if ours.shape != theirs.shape:
        detail = f"shape {list(ours.shape)} against {list(theirs.shape)}"
        return TensorDifference(moment, name, "shape", math.inf, detail)
    gap = sample_gap(ours, theirs)
    if ours.dtype != theirs.dtype:
        return TensorDifference(moment, name, "dtype", gap, f"{ours.dtype} against {theirs.dtype}")
    return TensorDifference(
        moment, name, "values", gap, f"differs by {gap:.2e} relative, norm {ours.norm:.6g} against {theirs.norm:.6g}"
    )


def sample_gap(ours: TensorSummary, theirs: TensorSummary) -> float:
    """The relative difference of two tensors, the larger of what norm and sample show; inf if not finite."""
    gap = math.dist(ours.sample, theirs.sample)
    size = math.hypot(*ours.sample)
    by_sample = gap / size if size else (0.0 if gap == 0 else math.inf)
    worst = max(by_sample, relative(ours.norm, theirs.norm))
    return worst if not math.isnan(gap) else math.inf


def _deviations(reference: Trace, candidate: Trace, tolerance: Tolerance) -> list[Deviation]:
    found = []
    for ours, theirs in zip(reference.steps, candidate.steps, strict=False):
        for what, a, b in _recorded(ours, theirs):
            norm = what in ("grad_norm", "applied_norm")
            if not (tolerance.close_norms(a, b) if norm else tolerance.close(ours.step, a, b)):
                allowed = tolerance.norms * abs(a) if norm else tolerance.allowed(ours.step, a)
                found.append(Deviation(what, ours.step, a, b, allowed))
    return found


def _recorded(ours: StepRecord, theirs: StepRecord) -> list[tuple[str, float, float]]:
    pairs = [("loss", ours.loss, theirs.loss)]
    for what in ("grad_norm", "applied_norm"):
        a, b = getattr(ours, what), getattr(theirs, what)
        if a is not None and b is not None:
            pairs.append((what, a, b))
    # Strategies differ in how they split parameter groups (frozen ones apart, decayed ones apart), so the distinct
    # rates are compared, not their number.
    rates, other = sorted(set(ours.lrs)), sorted(set(theirs.lrs))
    if rates and len(rates) == len(other):
        pairs += [("lr", a, b) for a, b in zip(rates, other, strict=True)]
    return pairs


def _judged_tensors(reference: Trace, candidate: Trace, tolerance: Tolerance) -> list[TensorDifference]:
    """What counts against the candidate: other tensors, shapes or starting weights, and final tensors that ended
    further apart than `tolerance.weights` of the way that training moved them."""
    found = []
    if reference.initial and candidate.initial:
        found += [
            d for d in tensor_differences(reference.initial, candidate.initial, "initial") if _too_far(d, tolerance)
        ]
    if reference.final and candidate.final:
        noise = _noise(reference)
        for item in tensor_differences(reference.final, candidate.final, "final"):
            if item.name in noise and item.kind == "values":
                continue
            if item.kind in ("missing", "extra", "shape") or not _moved_alike(
                item.name, reference, candidate, tolerance
            ):
                found.append(item)
    if reference.optimizer and candidate.optimizer:
        noise = _noise(reference)
        for item in tensor_differences(reference.optimizer, candidate.optimizer, "optimizer", common_only=True):
            name = item.name.rpartition(":")[0]
            if name not in noise and item.kind != "dtype" and item.relative > max(tolerance.weights, tolerance.rtol):
                found.append(item)
    return found


def _too_far(item: TensorDifference, tolerance: Tolerance) -> bool:
    return item.kind in ("missing", "extra", "shape") or item.relative > tolerance.first_rtol


def _moved_alike(name: str, reference: Trace, candidate: Trace, tolerance: Tolerance) -> bool:
    ours, theirs = reference.final[name], candidate.final[name]
    gap = math.dist(ours.sample, theirs.sample)
    start = reference.initial.get(name)
    if start is None or start.shape != ours.shape:
        return sample_gap(ours, theirs) <= tolerance.weights
    way = math.dist(ours.sample, start.sample)
    rounding = 1e-6 * math.hypot(*ours.sample)  # a few ulps of fp32 per step, whatever the way
    return gap <= tolerance.weights * way + rounding


def _noise(trace: Trace) -> set[str]:
    """Parameters whose gradient is rounding noise (a key bias in attention has none in exact arithmetic): Adam divides
    the noise by itself and moves them at full speed in a random direction, so they say nothing about a migration."""
    sizes = {
        name.rpartition(":")[0]: s.norm / math.sqrt(max(math.prod(s.shape), 1))
        for name, s in trace.optimizer.items()
        if name.endswith(":exp_avg")
    }
    largest = max(sizes.values(), default=0.0)
    return {name for name, size in sizes.items() if size < 1e-6 * largest}


def _first_tensors(reference: Trace, candidate: Trace) -> tuple[TensorDifference, ...]:
    for moment in ("initial", "after_first", "final"):
        ours, theirs = getattr(reference, moment), getattr(candidate, moment)
        if not ours or not theirs:
            continue
        found = tensor_differences(ours, theirs, moment)
        if any(item.relative > 1e-6 for item in found):
            return tuple(sorted(found, key=lambda item: -item.relative))
    return ()


def _bit_equal(reference: Trace, candidate: Trace) -> bool:
    if reference.losses != candidate.losses or not reference.steps:
        return False
    pairs = ((reference.initial, candidate.initial), (reference.final, candidate.final))
    return not any(ours and theirs and tensor_differences(ours, theirs, "final") for ours, theirs in pairs)
