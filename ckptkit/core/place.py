"""Places that need no file: bytes in memory, and a part of another place."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import Place


@dataclass(frozen=True, slots=True)
class Constant:
    """Packed bytes that are in memory already."""

    data: bytes | memoryview

    def read_into(self, start: int, buffer: memoryview) -> None:
        buffer[:] = memoryview(self.data)[start : start + len(buffer)]


@dataclass(frozen=True, slots=True)
class Shifted:
    """A place that starts `offset` bytes into another."""

    base: Place
    offset: int

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.base.read_into(self.offset + start, buffer)
