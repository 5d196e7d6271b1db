"""The executor: the only loop that moves tensor bytes to files, file by file, in bounded memory."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

from .gather import CHUNK, Arena, Move, elements, gather
from .layout import Body, Fill, Late, Layout, OutFile, Raw

Progress = Callable[[int], None]
_ZEROS = bytes(1 << 20)


class Sink(Protocol):
    """An open output file. Bytes are appended; `patch` goes back to what `Late` segments left open."""

    def write(self, data: bytes | memoryview) -> None: ...

    def patch(self, offset: int, data: bytes) -> None: ...

    def close(self) -> None:
        """Flush to the device (fsync) and close."""
        ...


def execute(
    layout: Layout,
    create: Callable[[str], Sink],
    move: Move,
    *,
    chunk: int = CHUNK,
    workers: int = 1,
    progress: Progress = lambda count: None,
) -> None:
    """Write every file of the layout. `create(name)` opens one; files go to `workers` threads, largest first.

    Memory: two buffers of `chunk` bytes a worker. The first error, or an interrupt, stops the rest at their next block
    and is raised.
    """
    if workers <= 1 or len(layout.files) == 1:
        for file in layout.files:
            write_file(file, create, move, chunk=chunk, progress=progress)
        return
    stop = threading.Event()
    errors: list[BaseException] = []

    def count(size: int) -> None:
        if stop.is_set():
            raise _StoppedError
        progress(size)

    def work(file: OutFile) -> None:
        if stop.is_set():
            return
        try:
            write_file(file, create, move, chunk=chunk, progress=count)
        except _StoppedError:
            pass
        except BaseException as error:
            stop.set()
            errors.append(error)

    with ThreadPoolExecutor(workers) as pool:
        try:
            wait([pool.submit(work, file) for file in sorted(layout.files, key=lambda file: -file.size)])
        except BaseException:
            stop.set()
            raise
    if errors:
        raise errors[0]


class _StoppedError(Exception):
    """Another worker failed, or a person interrupted."""


def write_file(
    file: OutFile, create: Callable[[str], Sink], move: Move, *, chunk: int = CHUNK, progress: Progress
) -> None:
    """Write one file: its segments in order, then the `Late` ones that waited for a checksum."""
    sink = create(file.name)
    checksums: dict[int, int] = {}
    late: list[tuple[int, Late]] = []
    checked = any(isinstance(segment, Late) for segment in file.segments)
    arena = Arena()
    offset = 0
    try:
        for segment in file.segments:
            if isinstance(segment, Late):
                late.append((offset, segment))
                sink.write(bytes(segment.size))
            else:
                for data in _bytes_of(segment, move, chunk, arena):
                    if checked and segment.record is not None:
                        checksums[segment.record] = zlib.crc32(data, checksums.get(segment.record, 0))
                    sink.write(data)
                    progress(len(data))
            offset += segment.size
        for at, segment in late:
            data = segment.make(checksums)
            if len(data) != segment.size:
                raise AssertionError(f"{file.name}: a segment of {segment.size} bytes became {len(data)}")
            sink.patch(at, data)
    finally:
        sink.close()


def _bytes_of(segment: Raw | Body | Fill, move: Move, chunk: int, arena: Arena) -> Iterable[bytes | memoryview]:
    if isinstance(segment, Body):
        limit = elements(segment.tensor, segment.dtype, chunk)
        for _, view in gather(segment.tensor, segment.box, segment.dtype, move, limit=limit, arena=arena):
            yield view
    elif isinstance(segment, Fill):
        for start in range(0, segment.size, len(_ZEROS)):
            yield _ZEROS[: min(len(_ZEROS), segment.size - start)]
    else:
        yield segment.data
