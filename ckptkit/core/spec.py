"""What a tensor is without its bytes: its key, its shape and dtype, its pieces and the places where they lie."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from .box import Box, Shape, whole
from .dtype import ITEMSIZE

Role = Literal["param", "frozen", "buffer", "optim", "extra"]


class TensorKey(NamedTuple):
    """The name of a tensor: the parameter or buffer it belongs to, and which of its tensors it is.

    Slots: `value` (the weight or buffer as the model holds it), `master` (fp32 master copy beside a low-precision
    value), `extra` (a tensor inside an extra such as RNG states), and the optimizer's own names: `step`, `exp_avg`, ...
    """

    fqn: str
    slot: str = "value"

    def __str__(self) -> str:
        return self.fqn if self.slot == "value" else f"{self.fqn}[{self.slot}]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype name (`core.dtype`) and role of a logical tensor."""

    shape: Shape
    dtype: str
    role: Role = "param"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


class Place(Protocol):
    """Where the packed, row-major bytes of one piece lie; only its reader knows what is behind it."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes `[start, start + len(buffer))` of the piece.

        Raises SourceError where the file ends before. Safe to call from several threads.
        """
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor, stored packed and row-major at a place, in `dtype` (which may differ from the spec's)."""

    box: Box
    place: Place
    dtype: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor: its spec and the pieces that cover it. Pieces may overlap: replicas hold the same values.

    `storage` tells equal storages apart from equal values: two tensors of one model with the same non-None `storage`
    are one tensor under two names (tied weights).
    """

    spec: TensorSpec
    pieces: tuple[Piece, ...]
    storage: object = None

    @classmethod
    def at(cls, place: Place, shape: Shape, dtype: str, role: Role = "param", storage: object = None) -> Tensor:
        """A tensor that lies whole at one place."""
        return cls(TensorSpec(shape, dtype, role), (Piece(whole(shape), place, dtype),), storage)

    def with_role(self, role: Role) -> Tensor:
        return replace(self, spec=replace(self.spec, role=role))

    def cast(self, dtype: str) -> Tensor:
        """The same bytes, read as `dtype`."""
        return replace(self, spec=replace(self.spec, dtype=dtype))
