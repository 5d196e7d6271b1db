"""Boxes: axis-aligned pieces of an n-dimensional tensor, and flat row-major runs split into them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `offsets[d] <= index[d] < offsets[d] + sizes[d]` of a tensor; a 0-d box is the scalar itself."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> Shape:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def __and__(self, other: Box) -> Box | None:
        """The shared box, or None where the two share no element."""
        low = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(a, b) - o for a, b, o in zip(self.ends, other.ends, low, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that cut this box out of an array that holds `outer`."""
        starts = tuple(o - p for o, p in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def holds(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return all(
            o <= p and p_end <= o_end
            for o, o_end, p, p_end in zip(self.offsets, self.ends, other.offsets, other.ends, strict=True)
        )


def whole(shape: Iterable[int]) -> Box:
    """The box of all elements of a tensor of this shape."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def boxes_of_run(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The boxes, in row-major order, that tile the flat elements `[start, stop)` of a tensor: at most 2n-1 of them.

    >>> list(boxes_of_run((3, 4), 2, 9))
    [Box(offsets=(0, 2), sizes=(1, 2)), Box(offsets=(1, 0), sizes=(1, 4)), Box(offsets=(2, 0), sizes=(1, 1))]
    """
    if stop <= start:
        return
    if not shape:
        yield Box((), ())
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        yield from _in_row(first, shape, head, tail)
        return
    if head:
        yield from _in_row(first, shape, head, inner)
        first += 1
    if last > first:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if tail:
        yield from _in_row(last, shape, 0, tail)


def _in_row(row: int, shape: Shape, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_run(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def shard(shape: Shape, dim: int, count: int, index: int) -> Box | None:
    """The box of shard `index` of `count` along `dim` by the rule of `torch.chunk`; None where it is empty.

    Source of the rule: `Shard._split_tensor` in torch/distributed/tensor/placement_types.py (2.13).
    """
    rows = shape[dim]
    step = -(-rows // count)
    low, high = min(index * step, rows), min((index + 1) * step, rows)
    if high <= low:
        return None
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = low, high - low
    return Box(tuple(offsets), tuple(sizes))


def blocks(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box, in its own row-major order, into boxes of at most `limit` elements (at least one element each)."""
    if box.numel <= max(limit, 1):
        if box.numel or not box.sizes:
            yield box
        return
    dim = next(d for d in range(len(box.sizes)) if math.prod(box.sizes[d + 1 :]) <= limit or d == len(box.sizes) - 1)
    step = max(1, limit // max(1, math.prod(box.sizes[dim + 1 :])))
    for index in indexes(box.sizes[:dim]):
        head = tuple(o + i for o, i in zip(box.offsets[:dim], index, strict=True))
        for low in range(0, box.sizes[dim], step):
            size = min(step, box.sizes[dim] - low)
            yield Box(
                (*head, box.offsets[dim] + low, *box.offsets[dim + 1 :]), (*(1,) * dim, size, *box.sizes[dim + 1 :])
            )


def indexes(sizes: Shape) -> Iterator[Shape]:
    """Every index of an array of these sizes, in row-major order (one empty index where there is no dimension)."""
    if not sizes:
        yield ()
        return
    for index in range(sizes[0]):
        for rest in indexes(sizes[1:]):
            yield (index, *rest)


def uncovered(shape: Shape, boxes: Iterable[Box]) -> tuple[int, Box | None]:
    """How many elements of a tensor the boxes miss, and one box of missed elements.

    Boxes may overlap (replicas). The holes are kept as a list of boxes and cut by each box in turn.
    """
    holes = [whole(shape)] if math.prod(shape) else []
    for box in boxes:
        if not holes:
            break
        holes = [part for hole in holes for part in minus(hole, box)]
    return sum(hole.numel for hole in holes), (holes[0] if holes else None)


def minus(hole: Box, box: Box) -> Iterator[Box]:
    """The boxes that tile the elements of `hole` which are not in `box`: at most 2n of them."""
    shared = hole & box
    if shared is None:
        yield hole
        return
    offsets, sizes = list(hole.offsets), list(hole.sizes)
    for dim in range(len(sizes)):
        before = shared.offsets[dim] - offsets[dim]
        after = offsets[dim] + sizes[dim] - shared.offsets[dim] - shared.sizes[dim]
        if before:
            yield Box(tuple(offsets), (*sizes[:dim], before, *sizes[dim + 1 :]))
        if after:
            low = (*offsets[:dim], shared.offsets[dim] + shared.sizes[dim], *offsets[dim + 1 :])
            yield Box(low, (*sizes[:dim], after, *sizes[dim + 1 :]))
        offsets[dim], sizes[dim] = shared.offsets[dim], shared.sizes[dim]
