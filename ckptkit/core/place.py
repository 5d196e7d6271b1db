"""Constant places: bytes in memory, for small values that no file holds as they are and for shards of live models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """Packed bytes that are in memory already."""

    data: bytes | memoryview

    def read_into(self, start: int, buffer: memoryview) -> None:
        buffer[:] = memoryview(self.data)[start : start + len(buffer)]
