"""Ranks' vectors to be written: a storage of a torch file made of parts of many tensors, and of zeros between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..core.box import Shape, boxes_of_run, whole
from ..core.dtype import ITEMSIZE
from ..core.layout import Body, Fill, Segment
from ..core.spec import Tensor, TensorKey
from ..io.pickle_out import StorageSlice
from ._zero_rule import FlatRule, Rule


class Stored(Protocol):
    """What a storage of a torch file holds; a rank's own part of it where the ranks' files differ."""

    def segments(self, rank: int) -> Iterator[Body | Fill]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """A rank's vector of some tensors, in the order of `shapes`; zeros for padding and for names without a tensor."""

    rule: Rule
    shapes: Mapping[str, Shape]
    tensors: Mapping[str, Tensor]
    slot: str
    dtype: str
    size: int

    def segments(self, rank: int) -> Iterator[Body | Fill]:
        width = ITEMSIZE[self.dtype]
        names = list(self.shapes)
        at = 0
        for span in self.rule.spans(rank):
            name = names[span.index]
            if name not in self.tensors:
                continue
            if span.offset > at:
                yield Fill((span.offset - at) * width)
            key = TensorKey(name, self.slot)
            for box in boxes_of_run(self.shapes[name], span.start, span.stop):
                yield Body(key, self.tensors[name], box, self.dtype)
            at = span.offset + span.stop - span.start
        if self.size > at:
            yield Fill((self.size - at) * width)


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """One whole tensor."""

    key: TensorKey
    tensor: Tensor
    dtype: str

    def segments(self, rank: int) -> Iterator[Body | Fill]:
        yield Body(self.key, self.tensor, whole(self.tensor.spec.shape), self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Nothing:
    """A storage of no bytes."""

    def segments(self, rank: int) -> Iterator[Body | Fill]:
        return iter(())


def vector(
    rule: Rule,
    shapes: Mapping[str, Shape],
    tensors: Mapping[str, Tensor],
    slot: str,
    dtype: str,
    *,
    lean: int | None = None,
) -> StorageSlice:
    """A rank's vector as a tensor; `lean`, the rank, leaves out the padding at the end of a group's vector."""
    size = rule.lean(lean) if lean is not None and isinstance(rule, FlatRule) else rule.size
    return StorageSlice(Vector(rule, shapes, tensors, slot, dtype, size), dtype, size, (size,))


def placeholder(dtype: str) -> StorageSlice:
    """An empty tensor, as ZeRO 3 leaves it in the module of a parameter that lies elsewhere."""
    return StorageSlice(Nothing(), dtype, 0, (0,))


def alone(tensor: Tensor, key: TensorKey, dtype: str | None = None, *, flat: bool = False) -> StorageSlice:
    """A tensor in a storage of its own, however often it is in the tree; `flat` in one dimension.

    Optimizers count steps in place: steps that share a storage would each count for all.
    """
    shape = (tensor.spec.numel,) if flat else tensor.spec.shape
    kind = dtype or tensor.spec.dtype
    return StorageSlice(Alone(key, tensor, kind), kind, tensor.spec.numel, shape)


def contents(label: Callable[[Tensor], TensorKey], rank: int = 0) -> Callable[[Any, int], Sequence[Segment]]:
    """How the storages of a rank's file are filled: other tensors than these are written whole."""

    def content(storage: Any, record: int) -> Sequence[Segment]:
        if isinstance(storage, Tensor):
            return [Body(label(storage), storage, whole(storage.spec.shape), storage.spec.dtype, record)]
        stored: Stored = storage
        return [replace(segment, record=record) for segment in stored.segments(rank)]

    return content
