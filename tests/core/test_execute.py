"""The executor: bytes in order, checksums for late segments, the first error raised, interrupts that stop."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Mapping

import pytest
import torch

from ckptkit.core.box import whole
from ckptkit.core.execute import execute
from ckptkit.core.layout import Body, Fill, Late, Layout, OutFile, Raw
from ckptkit.core.spec import Piece, Tensor, TensorKey, TensorSpec
from ckptkit.errors import SourceError
from ckptkit.io.move import move

from .layouts import data_of, numbered, of, piece

KEY = TensorKey("w")


class Sink:
    def __init__(self, files: dict[str, bytearray], name: str, closed: list[str]) -> None:
        self._data = files.setdefault(name, bytearray())
        self._name, self._closed = name, closed

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def patch(self, offset: int, data: bytes) -> None:
        self._data[offset : offset + len(data)] = data

    def close(self) -> None:
        self._closed.append(self._name)


def run(layout: Layout, **options: object) -> tuple[dict[str, bytearray], list[str]]:
    files: dict[str, bytearray] = {}
    closed: list[str] = []
    execute(layout, lambda name: Sink(files, name, closed), move, **options)  # type: ignore[arg-type]
    return files, closed


def body(values: torch.Tensor, record: int | None = None) -> Body:
    tensor = of(values, (piece(values, whole(tuple(values.shape))),))
    return Body(KEY, tensor, whole(tuple(values.shape)), "float32", record)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk", [4, 20, 1 << 20])
def test_every_file_holds_its_segments_and_the_checksums_of_its_records(workers: int, chunk: int) -> None:
    seen: list[Mapping[int, int]] = []

    def late(checksums: Mapping[int, int]) -> bytes:
        seen.append(dict(checksums))
        return checksums[5].to_bytes(4, "little") + checksums[6].to_bytes(4, "little")

    values = numbered((7, 3))
    data = data_of(values)
    segments = (Late(8, late), Raw(b"raw", 5), body(values, 6), Fill(2_000_003, 6), Raw(b"end"))
    layout = Layout(tuple(OutFile(f"file {i}", segments) for i in range(5)))
    total: list[int] = []
    files, closed = run(layout, workers=workers, chunk=chunk, progress=total.append)
    record = data + bytes(2_000_003)
    expected = zlib.crc32(b"raw").to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little")
    assert set(files) == {file.name for file in layout.files} == set(closed)
    assert all(data == expected + b"raw" + record + b"end" for data in files.values())
    assert all(len(data) == layout.files[0].size for data in files.values())
    assert sum(total) == layout.size - 5 * 8 and seen == [{5: zlib.crc32(b"raw"), 6: zlib.crc32(record)}] * 5


class Failing:
    """A place whose file ends early, after a while."""

    def __init__(self, wait: float) -> None:
        self.wait = wait

    def read_into(self, start: int, buffer: memoryview) -> None:
        time.sleep(self.wait)
        raise SourceError(f"failed after {self.wait}")


def failing(wait: float) -> Body:
    tensor = Tensor(TensorSpec((2,), "float32"), (Piece(whole((2,)), Failing(wait), "float32"),))
    return Body(KEY, tensor, whole((2,)), "float32")


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_is_raised_and_every_file_is_closed(workers: int) -> None:
    slow, quick = OutFile("slow", (failing(0.5), Fill(100))), OutFile("quick", (failing(0.0),))
    rest = tuple(OutFile(f"never {i}", (Fill(1),)) for i in range(20))
    files: dict[str, bytearray] = {}
    closed: list[str] = []
    with pytest.raises(SourceError, match="failed after 0.0" if workers > 1 else "failed after 0.5"):
        execute(Layout((slow, quick, *rest)), lambda name: Sink(files, name, closed), move, workers=workers)
    assert set(closed) == set(files)
    assert not any(name.startswith("never") for name in files)


def test_an_interrupt_stops_files_in_their_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the main thread while it waits: the workers must not go on to the end of their files."""
    from ckptkit.core import execute as module

    began = threading.Event()
    written: list[int] = []

    def interrupted(futures: object) -> None:
        began.wait(5)
        raise KeyboardInterrupt

    def progress(size: int) -> None:
        began.set()
        written.append(size)
        time.sleep(0.01)

    monkeypatch.setattr(module, "wait", interrupted)
    huge = Layout(tuple(OutFile(f"{i}", (Fill(1000 << 20),)) for i in range(2)))

    class Nowhere(Sink):
        def write(self, data: bytes | memoryview) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        execute(huge, lambda name: Nowhere({}, name, []), move, workers=2, progress=progress)
    assert len(written) < 100


def test_a_late_segment_of_another_size_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="a segment of 2 bytes became 3"):
        run(Layout((OutFile("a", (Late(2, lambda checksums: b"abc"),)),)))
