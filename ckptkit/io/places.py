"""Places: where packed bytes lie in a file, behind strides, or behind a compressed stream."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..core.dtype import ITEMSIZE
from ..core.spec import Place
from ..errors import SourceError

_OPEN_LIMIT = 256


class _Descriptors:
    """Open file descriptors by path, least recently used closed first; a read holds its descriptor open."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()

    def pread_into(self, path: str, buffer: memoryview, offset: int) -> int:
        with self._lock:
            descriptor = self._open.pop(path, None)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            return _pread_all(descriptor, buffer, offset)
        finally:
            with self._lock:
                spare = self._open.pop(path, None)
                self._open[path] = descriptor
                stale = [spare] if spare is not None else []
                while len(self._open) > self._limit:
                    stale.append(self._open.popitem(last=False)[1])
            for old in stale:
                os.close(old)

    def forget(self) -> None:
        """Close all: files may have been replaced under their names."""
        with self._lock:
            stale = list(self._open.values())
            self._open.clear()
        for descriptor in stale:
            os.close(descriptor)


def _pread_all(descriptor: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


_DESCRIPTORS = _Descriptors(_OPEN_LIMIT)


def forget_open_files() -> None:
    """Close the files that reading has kept open."""
    _DESCRIPTORS.forget()


@dataclass(frozen=True, slots=True, order=True)
class Seal:
    """The CRC-32 that a file keeps of `nbytes` bytes from `start` on."""

    path: str
    start: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class FileExtent:
    """Packed bytes that start at `offset` of a file; `seal` is of the storage that they are a part of."""

    path: str
    offset: int
    seal: Seal | None = None

    def read_into(self, start: int, buffer: memoryview) -> None:
        try:
            count = _DESCRIPTORS.pread_into(self.path, buffer, self.offset + start)
        except OSError as error:
            raise SourceError(
                f"cannot read {self.path}", why=str(error), hint="check that the file is there and readable"
            ) from error
        if count < len(buffer):
            raise SourceError(
                f"{self.path} ends early: {len(buffer) - count} bytes at {self.offset + start + count} are missing",
                why="the file is truncated, or it changed while it was read",
                hint="copy the checkpoint again from where it was written",
            )


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor whose elements do not lie row-major in its storage (it was saved transposed or sliced).

    Reads the part of the storage that a request spans, so a request costs memory of that span.
    """

    base: Place
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def read_into(self, start: int, buffer: memoryview) -> None:
        width = ITEMSIZE[self.dtype]
        first, count = start // width, len(buffer) // width
        ends = self._positions(np.arange(first, first + count)) if count else np.zeros(1, np.int64)
        low, high = int(ends.min()), int(ends.max())
        span = memoryview(bytearray((high - low + 1) * width))
        self.base.read_into(low * width, span)
        element = np.dtype((np.void, width))
        np.frombuffer(buffer, element)[:] = np.frombuffer(span, element)[ends - low]

    def _positions(self, flat: np.ndarray) -> np.ndarray:
        position = np.zeros_like(flat)
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            flat, index = np.divmod(flat, size)
            position += index * stride
        return position


@dataclass(slots=True)
class Inflated:
    """Bytes that exist only after decompression; inflated once, at the first read, and kept."""

    inflate: Callable[[], bytes]
    offset: int = 0
    _data: bytes | None = field(default=None, repr=False)

    def read_into(self, start: int, buffer: memoryview) -> None:
        if self._data is None:
            self._data = self.inflate()
        begin = self.offset + start
        part = memoryview(self._data)[begin : begin + len(buffer)]
        if len(part) < len(buffer):
            raise SourceError(
                "a compressed entry is shorter than its header says",
                why="the file is damaged, or its metadata is of another save",
                hint="copy the checkpoint again",
            )
        buffer[:] = part
