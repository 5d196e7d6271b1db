"""Layouts: which bytes go where in which file, known to the last byte before any tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .box import Box
from .dtype import ITEMSIZE
from .spec import Tensor, TensorKey


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes that are known already: headers, pickles, padding between records."""

    data: bytes
    record: int | None = None

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Body:
    """The elements `box` of a tensor, packed and row-major, cast to `dtype`. `key` names it in messages."""

    key: TensorKey
    tensor: Tensor
    box: Box
    dtype: str
    record: int | None = None

    @property
    def size(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Fill:
    """`size` zero bytes: padding of flat partitions."""

    size: int
    record: int | None = None


@dataclass(frozen=True, slots=True)
class Late:
    """`size` bytes that depend on the CRC-32 of records of the same file (zip headers); made when those are written."""

    size: int
    make: Callable[[Mapping[int, int]], bytes]


Segment = Raw | Body | Fill | Late


@dataclass(frozen=True, slots=True)
class OutFile:
    """One file: its path below the target, and its segments in order.

    Segments with the same `record` number are one record, and its CRC-32 is handed to the `Late` segments.
    """

    name: str
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def bodies(self) -> tuple[Body, ...]:
        return tuple(segment for segment in self.segments if isinstance(segment, Body))


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a target, in the order in which they become visible: metadata last.

    `is_file` says that the target is a single file (then `files` has one entry, its name unused). `implied` are tensors
    that the files hold without bytes of their own: a weight that is its master rounded, a step that a group shares.
    """

    files: tuple[OutFile, ...]
    is_file: bool = False
    implied: tuple[Tensor, ...] = ()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def held(self) -> set[int]:
        """The identities of all tensors that the files hold."""
        return {id(body.tensor) for file in self.files for body in file.bodies} | set(map(id, self.implied))

    def below(self, folder: str) -> Layout:
        """The same files one folder down."""
        files = tuple(OutFile(f"{folder}/{file.name}", file.segments) for file in self.files)
        return Layout(files, implied=self.implied)
