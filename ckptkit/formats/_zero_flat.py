"""Tensors out of ranks' vectors: a span of a vector becomes boxes of its parameter, at places inside the vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..core.box import Shape, boxes_of_run
from ..core.dtype import ITEMSIZE
from ..core.place import Shifted
from ..core.spec import Piece, Place, Tensor, TensorSpec
from ..io.places import FileExtent
from ._zero_rule import Rule, Span


def joined(shapes: Mapping[str, Shape], rule: Rule, vectors: Sequence[Tensor | None], dtype: str) -> dict[str, Tensor]:
    """The parameters that the ranks' vectors hold between them, by name; `dtype` is what they are read as.

    `shapes` are in the order of the rule. A rank whose vector is None holds nothing: what would be there is uncovered.
    """
    names = list(shapes)
    pieces: dict[str, list[Piece]] = {name: [] for name in names}
    for rank, vector in enumerate(vectors):
        for span in rule.spans(rank) if vector is not None else ():
            name = names[span.index]
            pieces[name].extend(_cut(vector, span, shapes[name]))
    return {name: Tensor(TensorSpec(shapes[name], dtype), tuple(found)) for name, found in pieces.items()}


def _cut(vector: Tensor | None, span: Span, shape: Shape) -> Iterator[Piece]:
    for whole in vector.pieces if vector is not None else ():
        at = span.offset * ITEMSIZE[whole.dtype]
        for box in boxes_of_run(shape, span.start, span.stop):
            yield Piece(box, _shifted(whole.place, at), whole.dtype)
            at += math.prod(box.sizes) * ITEMSIZE[whole.dtype]


def _shifted(place: Place, offset: int) -> Place:
    if isinstance(place, FileExtent):
        return replace(place, offset=place.offset + offset)
    return Shifted(place, offset)
