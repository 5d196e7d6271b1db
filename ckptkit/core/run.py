"""Flat runs as pieces: a vector that holds elements `[start, stop)` of a tensor, in boxes of that tensor."""

from __future__ import annotations

from collections.abc import Iterator

from .box import Shape, boxes_of_run
from .dtype import ITEMSIZE
from .place import Shifted
from .spec import Piece, Place


def pieces_of_run(shape: Shape, start: int, stop: int, place: Place, dtype: str, at: int = 0) -> Iterator[Piece]:
    """The pieces of the row-major elements `[start, stop)`, which lie packed at `place` from its element `at` on."""
    for box in boxes_of_run(shape, start, stop):
        yield Piece(box, Shifted(place, at * ITEMSIZE[dtype]) if at else place, dtype)
        at += box.numel
