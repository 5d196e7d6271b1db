"""The first update of each weight on both sides, from the samples of a trace: which tensors moved, by which ratio."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .compare import Comparison, relative
from .trace import TensorSummary


@dataclass(frozen=True, slots=True)
class Update:
    """One tensor before and after step 0 in the reference and in the candidate, as samples of equal places."""

    name: str
    reference_before: tuple[float, ...]
    reference_after: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    reference_is_still: bool
    is_still: bool

    @property
    def reference_delta(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.reference_before, self.reference_after, strict=True))

    @property
    def delta(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.before, self.after, strict=True))

    @property
    def ratio(self) -> float | None:
        """The factor between the two gradients as the updates show it; None if they are not proportional.

        Weight decay adds a multiple of the weights to both updates, so the weights are a second term of the fit.
        """
        return _fit(self.reference_delta, self.reference_before, self.delta)

    @property
    def differs_along_weights(self) -> bool:
        """Whether the updates differ by a multiple of the weights alone, as another weight decay would have it."""
        gap = tuple(a - b for a, b in zip(self.delta, self.reference_delta, strict=True))
        weights = self.reference_before
        size, length = _dot(weights, weights), math.hypot(*gap)
        if not size or not length:
            return False
        factor = _dot(gap, weights) / size
        return math.dist(gap, [factor * w for w in weights]) <= 0.05 * length + self.rounding

    @property
    def rounding(self) -> float:
        """How far two updates may lie apart for the rounding of the fp32 weights alone."""
        return 5e-7 * math.hypot(*self.reference_after)

    @property
    def is_off(self) -> bool:
        """Whether the candidate's update is another, beyond rounding."""
        gap = math.dist(self.delta, self.reference_delta)
        return gap > 1e-4 * math.hypot(*self.reference_delta) + self.rounding


def updates(comparison: Comparison) -> list[Update]:
    """The tensors that both sides know before and after step 0, in the reference's order."""
    ref, cand = comparison.reference, comparison.candidate
    found = []
    for name, start in ref.initial.items():
        parts = (start, ref.after_first.get(name), cand.initial.get(name), cand.after_first.get(name))
        if any(part is None or part.shape != start.shape for part in parts):
            continue
        a, b, c, d = (part for part in parts if part is not None)
        found.append(Update(name, a.sample, b.sample, c.sample, d.sample, _still(a, b), _still(c, d)))
    return found


def common_ratio(seen: Sequence[Update]) -> float | None:
    """The factor that all moving tensors share (within 1 %); None when they do not, or when none moves."""
    ratios = [u.ratio for u in seen if not u.reference_is_still and any(u.reference_delta)]
    known = sorted(r for r in ratios if r is not None)
    if not known or len(known) < 0.8 * len(ratios):
        return None
    middle = known[len(known) // 2]
    close = [r for r in known if abs(r - middle) <= 1e-2 * abs(middle)]
    return middle if len(close) >= 0.8 * len(known) else None


def first_gradient_is_right(c: Comparison) -> bool:
    """Whether loss and gradient norms of step 0 agree, so that only the update can be at fault."""
    if not c.reference.steps or not c.candidate.steps:
        return False
    ours, theirs = c.reference.steps[0], c.candidate.steps[0]
    if not c.tolerance.close(0, ours.loss, theirs.loss):
        return False
    pairs = ((ours.grad_norm, theirs.grad_norm), (ours.applied_norm, theirs.applied_norm))
    return all(a is None or b is None or relative(a, b) <= 1e-3 for a, b in pairs)


def only_low_precision(sample: Sequence[float]) -> bool:
    """Whether every value is a bf16 number or every value an fp16 number.

    At least one must not be a small multiple of 1/8: zeros and ones exist in any format and tell nothing.
    """
    if not any(value * 8 % 1 for value in sample if math.isfinite(value)):
        return False
    return all(map(_is_bf16, sample)) or all(map(_is_fp16, sample))


def _still(before: TensorSummary, after: TensorSummary) -> bool:
    return before.same_bits(after)


def _fit(base: Sequence[float], second: Sequence[float], target: Sequence[float]) -> float | None:
    """r of target = r * base + s * second by least squares; None where more than 1 % of the target is left over."""
    bb, bs, ss = _dot(base, base), _dot(base, second), _dot(second, second)
    bt, st, tt = _dot(base, target), _dot(second, target), _dot(target, target)
    if len(base) < 3 or not bb or not tt:
        return None
    determinant = bb * ss - bs * bs
    alone = determinant <= 1e-9 * bb * ss  # no weights, or weights along the update
    r = bt / bb if alone else (bt * ss - st * bs) / determinant
    s = 0.0 if alone else (st * bb - bt * bs) / determinant
    left = math.sqrt(sum((t - r * b - s * w) ** 2 for b, w, t in zip(base, second, target, strict=True)))
    return r if left <= 1e-2 * math.sqrt(tt) else None


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _is_bf16(value: float) -> bool:
    return struct.pack(">f", value)[2:] == b"\0\0" if math.isfinite(value) else True


def _is_fp16(value: float) -> bool:
    try:
        return struct.unpack(">e", struct.pack(">e", value))[0] == value
    except OverflowError:
        return False
