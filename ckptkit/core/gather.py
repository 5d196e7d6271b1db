"""Gather: the elements of one box, from the pieces that hold them, into one packed buffer of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from .box import Box, Shape, blocks, indexes
from .dtype import ITEMSIZE
from .plan import sources
from .spec import Piece, Tensor

CHUNK = 32 << 20
"""Default bound of one buffer, in bytes."""

_RUN = 4096  # shorter contiguous runs than this are read as one strided span


class Move(Protocol):
    """Copies `sizes` elements between two strided layouts and casts them; strides and offset count elements."""

    def __call__(
        self,
        source: memoryview,
        source_dtype: str,
        source_strides: Shape,
        target: memoryview,
        target_dtype: str,
        target_strides: Shape,
        target_offset: int,
        sizes: Shape,
    ) -> None: ...


def packed_strides(sizes: Shape) -> Shape:
    """Row-major strides, in elements.

    >>> packed_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


class Arena:
    """Two buffers, one for output blocks and one for input spans, kept from tensor to tensor by one worker."""

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers = {"block": bytearray(), "span": bytearray()}

    def take(self, name: str, size: int) -> memoryview:
        """The first `size` bytes of a buffer. A larger one replaces it: views handed out before stay valid."""
        if len(self._buffers[name]) < size:
            self._buffers[name] = bytearray(size)
        return memoryview(self._buffers[name])[:size]


def elements(tensor: Tensor, dtype: str, chunk: int) -> int:
    """How many elements of a tensor fit a buffer of `chunk` bytes, both as they are stored and as `dtype`."""
    return max(1, chunk // max(ITEMSIZE[dtype], *(ITEMSIZE[piece.dtype] for piece in tensor.pieces), 1))


def gather(
    tensor: Tensor, box: Box, dtype: str, move: Move, *, limit: int | None = None, arena: Arena | None = None
) -> Iterator[tuple[Box, memoryview]]:
    """Yield the elements of `box` in its row-major order as `(block, bytes)`, each of at most `limit` elements.

    The memory of one block is reused for the next: use it before asking for more.
    Raises SourceError where no piece holds an element or a file ends early.
    """
    arena = arena or Arena()
    limit = limit or elements(tensor, dtype, CHUNK)
    for block in blocks(box, limit):
        view = arena.take("block", block.numel * ITEMSIZE[dtype])
        for piece, shared in sources(tensor, block):
            _copy(piece, shared, block, view, dtype, move, arena, limit)
        yield block, view


def _copy(
    piece: Piece, box: Box, block: Box, out: memoryview, dtype: str, move: Move, arena: Arena, limit: int
) -> None:
    width = ITEMSIZE[dtype]
    source_strides, target_strides = packed_strides(piece.box.sizes), packed_strides(block.sizes)
    start = _flat(box.offsets, piece.box.offsets, source_strides)
    offset = _flat(box.offsets, block.offsets, target_strides)
    run, heads = _runs(box, piece.box, block)
    if piece.dtype == dtype and (not heads or run * width >= _RUN):
        for index in indexes(box.sizes[:heads]):
            at = start + sum(i * s for i, s in zip(index, source_strides, strict=False))
            to = offset + sum(i * s for i, s in zip(index, target_strides, strict=False))
            piece.place.read_into(at * width, out[to * width : (to + run) * width])
        return
    last = sum((size - 1) * stride for size, stride in zip(box.sizes, source_strides, strict=True))
    if last + 1 > limit and box.numel > 1:
        # A thin slice of wide rows: halve it until the span that holds it fits the bound.
        dim = next(d for d, size in enumerate(box.sizes) if size > 1)
        half = box.sizes[dim] // 2
        head = Box(box.offsets, (*box.sizes[:dim], half, *box.sizes[dim + 1 :]))
        tail_offsets = (*box.offsets[:dim], box.offsets[dim] + half, *box.offsets[dim + 1 :])
        tail = Box(tail_offsets, (*box.sizes[:dim], box.sizes[dim] - half, *box.sizes[dim + 1 :]))
        for part in (head, tail):
            _copy(piece, part, block, out, dtype, move, arena, limit)
        return
    read_width = ITEMSIZE[piece.dtype]
    view = arena.take("span", (last + 1) * read_width)
    piece.place.read_into(start * read_width, view)
    move(view, piece.dtype, source_strides, out, dtype, target_strides, offset, box.sizes)


def _flat(offsets: Shape, origin: Shape, strides: Shape) -> int:
    return sum((o - p) * s for o, p, s in zip(offsets, origin, strides, strict=True))


def _runs(box: Box, source: Box, target: Box) -> tuple[int, int]:
    """The length in elements of the runs that are contiguous on both sides, and over how many leading dims they lie."""
    dim = len(box.sizes)
    while dim > 0 and box.sizes[dim - 1] == source.sizes[dim - 1] == target.sizes[dim - 1]:
        dim -= 1
    heads = max(dim - 1, 0)
    return math.prod(box.sizes[heads:]), heads
