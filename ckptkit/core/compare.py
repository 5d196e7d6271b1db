"""Compare two tensors of any layout in bounded memory: a plan with "compare" in the place of "write"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .box import Shape, whole
from .gather import CHUNK, Move, elements, gather
from .spec import Tensor


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How two tensors of one shape differ: greatest absolute and relative difference, count, and the first index."""

    max_abs: float
    max_rel: float
    count: int
    first: Shape


@dataclass(frozen=True, slots=True)
class BlockDiff:
    """The same for one packed block; `first` is a flat position in it."""

    max_abs: float
    max_rel: float
    count: int
    first: int


Differ = Callable[[memoryview, memoryview, str, "tuple[float, float] | None"], "BlockDiff | None"]
"""Compares two packed blocks of one dtype: bit for bit, or within (rtol, atol). None where they are equal."""


def compare(
    a: Tensor,
    b: Tensor,
    move: Move,
    differ: Differ,
    *,
    dtype: str | None = None,
    tolerance: tuple[float, float] | None = None,
    chunk: int = CHUNK,
    first_only: bool = False,
) -> ValueDiff | None:
    """The difference of two tensors of the same shape, both read as `dtype` (default: that of `a`); None if none.

    Without a tolerance (rtol, atol) equal means equal in every bit. `first_only` stops at the first block that differs.
    """
    kind = dtype or a.spec.dtype
    box = whole(a.spec.shape)
    found: ValueDiff | None = None
    # One limit for both, so that the two sides cut the box into the same blocks.
    limit = min(elements(a, kind, chunk), elements(b, kind, chunk))
    pairs = zip(gather(a, box, kind, move, limit=limit), gather(b, box, kind, move, limit=limit), strict=True)
    for (block, left), (_, right) in pairs:
        diff = differ(left, right, kind, tolerance)
        if diff is None:
            continue
        first = found.first if found else _index(block.offsets, block.sizes, diff.first)
        found = ValueDiff(
            max(diff.max_abs, found.max_abs if found else 0.0),
            max(diff.max_rel, found.max_rel if found else 0.0),
            diff.count + (found.count if found else 0),
            first,
        )
        if first_only:
            break
    return found


def _index(offsets: Shape, sizes: Shape, flat: int) -> Shape:
    index: list[int] = []
    for offset, size in zip(reversed(offsets), reversed(sizes), strict=True):
        flat, at = divmod(flat, size)
        index.append(offset + at)
    return tuple(reversed(index))
