"""The plan of a conversion: the layout with every body checked for sources, the casts, the drops, the warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import SourceError
from .box import Box, minus, uncovered
from .checkpoint import Drop
from .dtype import is_lossless
from .layout import Body, Layout, Raw
from .spec import Piece, Tensor, TensorKey


@dataclass(frozen=True, slots=True)
class Copy:
    """`box` of the tensor `key` is read from `source` and written into the file `target`."""

    key: TensorKey
    box: Box
    source: Piece
    target: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor whose dtype changes; `lossless` where every value of the old dtype is one of the new."""

    key: TensorKey
    source: str
    target: str

    @property
    def lossless(self) -> bool:
        return is_lossless(self.source, self.target)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion will do. Pure data: nothing was read but metadata, nothing is written."""

    layout: Layout
    drops: tuple[Drop, ...]
    casts: tuple[Cast, ...]
    warnings: tuple[str, ...]
    peak_bytes: int

    def copies(self) -> Iterator[Copy]:
        """Every piece of every body with the piece of the source that it is read from, in writing order."""
        for file in self.layout.files:
            for body in file.bodies:
                for piece, box in sources(body.tensor, body.box):
                    yield Copy(body.key, box, piece, file.name, body.dtype)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        bodies = [body for file in self.layout.files for body in file.bodies]
        return {
            "files": [{"name": file.name, "bytes": file.size} for file in self.layout.files],
            "tensors": len({(body.key, body.tensor.spec.shape) for body in bodies}),
            "copies": sum(1 for _ in self.copies()),
            "bytes": self.layout.size,
            "tensor_bytes": sum(body.size for body in bodies),
            "casts": [
                {"tensor": str(cast.key), "from": cast.source, "to": cast.target, "lossless": cast.lossless}
                for cast in self.casts
            ],
            "drops": [{"what": drop.what, "reason": drop.reason} for drop in self.drops],
            "warnings": list(self.warnings),
            "peak_bytes": self.peak_bytes,
        }


def sources(tensor: Tensor, box: Box) -> Iterator[tuple[Piece, Box]]:
    """The pieces that `box` is read from, each with its share; every element once, though pieces may overlap."""
    holes = [box] if box.numel else []
    for piece in tensor.pieces:
        if not holes:
            return
        if piece.box & box is None:
            continue
        left: list[Box] = []
        for hole in holes:
            shared = hole & piece.box
            if shared is not None:
                yield piece, shared
            left.extend(minus(hole, piece.box))
        holes = left
    if holes:
        raise SourceError(
            f"no source for {sum(hole.numel for hole in holes)} elements, the first at {holes[0].offsets}",
            why="the pieces of the tensor do not cover it",
            hint="a shard is missing or belongs to another checkpoint",
        )


def check_coverage(tensors: Iterable[tuple[TensorKey, Tensor]]) -> None:
    """Raise SourceError naming every tensor whose pieces leave elements out or lie outside of it."""
    faults: list[str] = []
    for key, tensor in tensors:
        shape = tensor.spec.shape
        outside = [
            piece.box
            for piece in tensor.pieces
            if len(piece.box.sizes) != len(shape)
            or any(o < 0 or o + s > n for o, s, n in zip(piece.box.offsets, piece.box.sizes, shape, strict=True))
        ]
        if outside:
            faults.append(f"{key}: a piece at {outside[0].offsets} of size {outside[0].sizes} is outside of {shape}")
            continue
        missing, hole = uncovered(shape, (piece.box for piece in tensor.pieces))
        if missing and hole is not None:
            faults.append(f"{key}: {missing} of {math.prod(shape)} elements are nowhere, the first at {hole.offsets}")
    if faults:
        raise SourceError(
            f"the source is incomplete: {len(faults)} tensors are not covered by its files",
            why="shards are missing, or come from another step or another world size",
            hint="restore the missing files; nothing was written",
            faults=faults,
        )


def make_plan(layout: Layout, drops: Iterable[Drop], warnings: Iterable[str], *, chunk: int, workers: int) -> Plan:
    """Check that every body has its sources and sum up what will happen. `chunk` is in bytes.

    Raises SourceError where a tensor is not covered.
    """
    bodies = [body for file in layout.files for body in file.bodies]
    once: dict[int, tuple[TensorKey, Tensor]] = {id(body.tensor): (body.key, body.tensor) for body in bodies}
    check_coverage(once.values())
    casts = {
        body.key: Cast(body.key, piece.dtype, body.dtype)
        for body in bodies
        for piece in body.tensor.pieces[:1]
        if piece.dtype != body.dtype
    }
    literals = sum(segment.size for file in layout.files for segment in file.segments if isinstance(segment, Raw))
    # Each worker holds one output block and, where it casts or gathers strided pieces, one input span of that size.
    peak = literals + workers * 2 * min(chunk, max((body.size for body in bodies), default=0))
    return Plan(layout, tuple(drops), tuple(casts.values()), tuple(dict.fromkeys(warnings)), peak)


def body_of(key: TensorKey, tensor: Tensor, box: Box, dtype: str | None = None, record: int | None = None) -> Body:
    """A body in the tensor's own dtype unless another is asked for."""
    return Body(key, tensor, box, dtype or tensor.spec.dtype, record)
