"""Ranks' vectors to be written: a storage of a torch file made of parts of many tensors, and of zeros between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.box import Shape, boxes_of_run, whole
from ..core.dtype import ITEMSIZE
from ..core.layout import Body, Fill, Segment
from ..core.spec import Tensor, TensorKey
from ..io.pickle_out import StorageSlice
from ._zero_rule import FlatRule, Rule


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """A storage by its segments."""

    segments: tuple[Body | Fill, ...]


def vector(
    rule: Rule,
    rank: int,
    shapes: Mapping[str, Shape],
    tensors: Mapping[str, Tensor],
    slot: str,
    dtype: str,
    *,
    lean: bool = False,
) -> StorageSlice:
    """A rank's vector of the tensors, in the order of `shapes`; zeros for padding and for names without a tensor.

    `lean` leaves out the padding at the end of a group's vector.
    """
    width = ITEMSIZE[dtype]
    names = list(shapes)
    size = rule.lean(rank) if lean and isinstance(rule, FlatRule) else rule.size
    segments: list[Body | Fill] = []
    at = 0
    for span in rule.spans(rank):
        name = names[span.index]
        length = span.stop - span.start
        if name not in tensors:
            continue
        if span.offset > at:
            segments.append(Fill((span.offset - at) * width))
        key = TensorKey(name, slot)
        boxes = boxes_of_run(shapes[name], span.start, span.stop)
        segments += [Body(key, tensors[name], box, dtype) for box in boxes]
        at = span.offset + length
    if size > at:
        segments.append(Fill((size - at) * width))
    return StorageSlice(Vector(tuple(segments)), dtype, size, (size,))


def placeholder(dtype: str) -> StorageSlice:
    """An empty tensor, as ZeRO 3 leaves it in the module of a parameter that lies elsewhere."""
    return StorageSlice(Vector(()), dtype, 0, (0,))


def alone(tensor: Tensor, key: TensorKey, dtype: str | None = None, *, flat: bool = False) -> StorageSlice:
    """A tensor in a storage of its own, however often it is in the tree; `flat` in one dimension.

    Optimizers count steps in place: steps that share a storage would each count for all.
    """
    shape = (tensor.spec.numel,) if flat else tensor.spec.shape
    kind = dtype or tensor.spec.dtype
    return StorageSlice(Vector((Body(key, tensor, whole(tensor.spec.shape), kind),)), kind, tensor.spec.numel, shape)


def contents(label: Callable[[Tensor], TensorKey]) -> Callable[[Any, int], Sequence[Segment]]:
    """How the storages of a file are filled: vectors by their segments, other tensors whole."""

    def content(storage: Any, record: int) -> Sequence[Segment]:
        if isinstance(storage, Vector):
            return [replace(segment, record=record) for segment in storage.segments]
        return [Body(label(storage), storage, whole(storage.spec.shape), storage.spec.dtype, record)]

    return content
