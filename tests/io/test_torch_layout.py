"""Torch files that are laid out here: torch loads them in every way it can, zip tools find nothing wrong."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.core.execute import execute
from ckptkit.core.layout import Fill, Layout, OutFile, Segment
from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor, TensorKey
from ckptkit.io.move import move
from ckptkit.io.stage import Stage
from ckptkit.io.torch_file import load_tree
from ckptkit.io.torch_layout import _zip, tensor_content, torch_file

from .files import DTYPES, others, plain, read, same, values


def stored(tensor: torch.Tensor) -> Tensor:
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
    return Tensor.at(Constant(data), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def write(path: Path, segments: Sequence[Segment]) -> Path:
    execute(Layout((OutFile("x", tuple(segments)),), is_file=True), Stage(path, True).create, move, chunk=1 << 12)
    return path


def label(tensor: Tensor) -> TensorKey:
    return TensorKey("w")


def content() -> dict[str, torch.Tensor]:
    out = {str(dtype): values(dtype, 3, 5) for dtype in DTYPES}
    return out | {"0-d": torch.tensor(2**40 + 3), "0-d float": torch.tensor(3.25), "empty": torch.empty(0, 3),
                  "long": torch.randn(3000)}  # fmt: skip


@pytest.mark.parametrize("options", [{"weights_only": True}, {"weights_only": False}, {"mmap": True}], ids=str)
def test_torch_loads_what_is_written(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors = content()
    tree = {"model": {name: stored(tensor) for name, tensor in tensors.items()}, "step": 3, "lr": [0.1, None, True]}
    path = write(tmp_path / "a.pt", torch_file(tree, tensor_content(label)))
    loaded = torch.load(path, **options)
    assert [name for name, tensor in tensors.items() if not same(loaded["model"][name], tensor)] == []
    assert (loaded["step"], loaded["lr"]) == (3, [0.1, None, True])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [f"archive/{name}" for name in (
            "data.pkl", ".format_version", ".storage_alignment", "byteorder",
            *(f"data/{i}" for i in range(len(tensors))), "version", ".data/serialization_id")]  # fmt: skip
    assert same(read(path)["model"], tensors)


def test_every_record_is_aligned_as_torch_aligns_it(tmp_path: Path) -> None:
    tree = {f"w{i}": stored(torch.randn(i + 1)) for i in range(9)}
    path = write(tmp_path / "a.pt", torch_file(tree, tensor_content(label)))
    found = load_tree(path)
    assert {tensor.pieces[0].place.offset % 64 for tensor in found.values()} == {0}


def test_tied_tensors_are_one_storage(tmp_path: Path) -> None:
    one = stored(torch.randn(5))
    path = write(tmp_path / "a.pt", torch_file({"a": one, "b": one}, tensor_content(label)))
    loaded = torch.load(path)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_what_is_no_tensor_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = {name: value for name, value in others().items() if name != "dict subclass"}
    path = write(tmp_path / "a.pt", torch_file(tree, tensor_content(label)))
    loaded = torch.load(path, weights_only=False)
    assert [name for name in tree if not same(loaded[name], tree[name])] == []
    assert same(read(path), plain(loaded))


def test_two_writes_give_the_same_bytes(tmp_path: Path) -> None:
    tree = {"a": stored(torch.ones(5)), "b": {"c": 1}}
    one, other = (write(tmp_path / name, torch_file(tree, tensor_content(label))) for name in ("a", "b"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("size", [(1 << 32) - 1, 1 << 32, (1 << 32) + 12])
def test_records_beyond_4_gib_have_zip64_headers(tmp_path: Path, size: int) -> None:
    """The file is sparse: `Fill` stands for the bytes of a huge storage and is skipped, not written."""
    huge = Tensor.at(Constant(b""), (size,), "uint8")
    small = stored(torch.arange(5))

    def segments(storage: Any, record: int) -> list[Segment]:
        return [Fill(size)] if storage is huge else list(tensor_content(label)(storage, record))

    laid = torch_file({"huge": huge, "small": small}, segments)
    path = tmp_path / "a.pt"
    _write_sparse(path, laid)
    assert path.stat().st_size > size
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        assert infos["archive/data/0"].file_size == size
        assert infos["archive/version"].header_offset > size
        # zipfile checks each local header against the directory, checksums included, for what it can read quickly.
        for name in ("archive/data.pkl", "archive/data/1", "archive/version", "archive/.data/serialization_id"):
            archive.read(name)
    loaded = torch.load(path, mmap=True)
    assert loaded["huge"].numel() == size and int(loaded["huge"][-1]) == 0
    assert torch.equal(loaded["small"], torch.arange(5))
    assert same(plain(load_tree(path)["small"]), torch.arange(5))


def _write_sparse(path: Path, segments: Sequence[Segment]) -> None:
    with path.open("wb") as file:

        def create(name: str) -> Any:
            return _Sparse(file)

        # Everything but the fill is small: it goes through the executor as in a conversion.
        execute(Layout((OutFile("x", tuple(segments)),)), create, move, chunk=1 << 20)
        file.truncate(max(file.tell(), os.fstat(file.fileno()).st_size))


class _Sparse:
    """A sink that leaves zeros out."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        if len(data) >= 1 << 20:
            self._file.seek(len(data), os.SEEK_CUR)
        else:
            self._file.write(data)

    def patch(self, offset: int, data: bytes) -> None:
        at = self._file.tell()
        self._file.seek(offset)
        self._file.write(data)
        self._file.seek(at)

    def close(self) -> None:
        self._file.flush()


def test_more_records_than_a_plain_directory_counts() -> None:
    """65,535 records and more need the zip64 end of the directory."""
    end = list(_zip([(b"archive/%d" % index, []) for index in range(65_600)], 0))[-1].make({})  # type: ignore[union-attr]
    assert end[-98:-94] == b"PK\x06\x06" and end[-42:-38] == b"PK\x06\x07" and end[-22:-18] == b"PK\x05\x06"
    assert struct.unpack("<Q", end[-98 + 32 : -98 + 40])[0] == 65_600
