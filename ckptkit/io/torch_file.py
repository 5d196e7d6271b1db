"""Torch files, zip or legacy: shapes, dtypes and byte positions of every tensor, without its bytes.

Sources: torch/serialization.py `_save` and `_load`, and caffe2/serialize/inline_container.cc (2.13).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from ..core.dtype import ITEMSIZE
from ..core.place import Constant
from ..core.spec import Place, Tensor
from ..core.tree import Tree
from ..errors import SourceError
from .globals import Storage, TensorStub, dtype_of
from .legacy_file import ENDIAN, ENDIAN_HINT, MAGIC, load_legacy
from .places import FileExtent, Seal, Strided
from .unpickle import as_tree, unpickle

_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DESCRIPTORS = (16, 24)  # bytes of a data descriptor, which may follow a record: signature, CRC-32 and two sizes
_HAS_DESCRIPTOR = 0x08  # the bit of a record's flags
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
# What zipfile raises for damaged archives, as found by flipping their bits.
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OverflowError, EOFError, IndexError,
            struct.error, zlib.error)  # fmt: skip


class _Window(io.RawIOBase):
    """The bytes `[start, start + size)` of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file's first bytes are those of a torch file, zip or legacy. Unpickles nothing."""
    try:
        with open(path, "rb") as file:
            head = file.read(16)
            if head[:4] == _ZIP_MAGIC:
                return any(
                    name.endswith("/data.pkl") or name == "data.pkl" for name in zipfile.ZipFile(file).namelist()
                )
    except OSError:
        return False
    except _BAD_ZIP:
        # A zip whose directory is gone is a truncated torch file: reading it says so.
        return True
    return head[:1] == b"\x80" and head[2:13] == b"\x8a\x0a" + MAGIC.to_bytes(10, "little")[:9]


def load_raw(path: str | os.PathLike[str], start: int = 0, size: int | None = None) -> Any:
    """What the pickle in a torch file says, with `TensorStub`s for tensors and `Standin`s for unknown classes.

    `start` and `size` choose a torch file inside another file (a DCP entry). Raises SourceError for a truncated or
    foreign file, UnsafePickleError for one that could only run something.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            size = total - start if size is None else size
            if start < 0 or size < 0 or start + size > total:
                raise SourceError(
                    f"{name} ends early: an entry at {start} of {size} bytes, the file has {total}",
                    why="the file is truncated",
                    hint="copy the checkpoint again",
                )
            return _load(io.BufferedReader(_Window(file, start, size)), name, start)
    except FileNotFoundError as error:
        raise SourceError(f"{name} does not exist", why=str(error), hint="check the path") from error
    except OSError as error:
        raise SourceError(f"cannot read {name}", why=str(error), hint="check that it is a readable file") from error


def load_tree(path: str | os.PathLike[str], start: int = 0, size: int | None = None) -> Tree:
    """The same as a tree of `core.spec.Tensor`s, plain values and `Opaque` objects."""
    return as_tree(load_raw(path, start, size), to_tensor)


def load_tree_of_bytes(data: bytes, name: str) -> Tree:
    """The tree of a torch file in memory (one that was stored compressed); its tensors lie in `data`, which is kept."""
    raw = _load(io.BufferedReader(_Window(io.BytesIO(data), 0, len(data))), name, 0)

    def extent(stub: TensorStub, offset: int) -> Place:
        if stub.storage.offset + stub.storage.nbytes > len(data):
            raise SourceError(
                f"{name} ends early: storage {stub.storage.key} reaches beyond it",
                why="the file is damaged",
                hint="copy it again",
            )
        return Constant(memoryview(data)[offset:])

    return as_tree(raw, lambda stub: to_tensor(stub, extent))


def _load(window: io.BufferedReader[_Window], name: str, start: int) -> Any:
    if window.peek(4)[:4] == _ZIP_MAGIC:
        return _load_zip(window, name, start)
    return load_legacy(window, name, start)


def _load_zip(file: io.BufferedReader[_Window], name: str, start: int) -> Any:
    try:
        archive = zipfile.ZipFile(file)
        records = _records(archive, name)
        pickle = archive.read(records["data.pkl"])
        byteorder = archive.read(records["byteorder"]) if "byteorder" in records else b"little"
        offsets = _data_offsets(file, archive, name)
    except _BAD_ZIP as error:
        raise SourceError(
            f"{name} is a damaged torch file",
            why=str(error) or type(error).__name__,
            hint="it is truncated or was changed; copy the checkpoint again",
        ) from error
    if byteorder != b"little":
        raise SourceError(f"{name} was written on a big-endian machine", why=ENDIAN, hint=ENDIAN_HINT)

    def storage(pid: Any) -> Storage:
        _, kind, key, _, numel = pid
        info = records.get(f"data/{key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"it has no stored record data/{key}")
        dtype = dtype_of(kind)
        if not 0 <= int(numel) * (ITEMSIZE[dtype] if dtype else 1) <= info.file_size:
            raise ValueError(f"record data/{key} holds {info.file_size} bytes, less than its {numel} elements")
        crc = getattr(info, "CRC", None)
        return Storage(str(key), dtype, info.file_size, name, start + offsets[info.header_offset], crc)

    return unpickle(pickle, name, persistent_load=storage)


def _records(archive: zipfile.ZipFile, name: str) -> dict[str, zipfile.ZipInfo]:
    """The records of a torch archive by their names below its root."""
    records: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        record = info.filename.partition("/")[2] or info.filename
        if record in records:
            raise zipfile.BadZipFile(f"it has two records {record}")
        if info.CRC == 0:
            # `torch.serialization.set_crc32_options(False)` writes zeros; without the attribute zipfile checks nothing.
            del info.CRC
        records[record] = info
    if "data.pkl" not in records:
        raise SourceError(
            f"{name} is a zip but no torch file", why="it has no data.pkl", hint="name another file, or unpack it"
        )
    if "constants.pkl" in records:
        raise SourceError(
            f"{name} is a TorchScript archive",
            why="it holds a program, not a state dict",
            hint="load it with torch.jit.load and save its state_dict()",
        )
    if records["data.pkl"].compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile("its data.pkl is compressed, which torch.save never does")
    return records


def _data_offsets(file: BinaryIO, archive: zipfile.ZipFile, name: str) -> dict[int, int]:
    """Where each record's bytes begin, by where its header begins.

    A record's local header gives the length of what stands before its data; a wrong one would shift every value. So
    each record must carry its own name and end where the next one begins, as in every archive that was written once.
    """
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    offsets: dict[int, int] = {}
    for info, end in zip(infos, ends, strict=True):
        file.seek(info.header_offset)
        fields = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        named = file.read(fields[9])
        begin = info.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10]
        if fields[0] != _ZIP_MAGIC or named not in (info.orig_filename.encode(), info.orig_filename.encode("cp437")):
            raise zipfile.BadZipFile(f"the header of its record {info.filename} is another record's")
        stop = begin + info.compress_size
        ends_well = end == stop
        if info.flag_bits & _HAS_DESCRIPTOR:
            # By its signature, too: a begin that is off by a few bytes leaves a descriptor of another length, or none.
            file.seek(stop)
            ends_well = file.read(4) == _DESCRIPTOR_MAGIC and end - stop in _DESCRIPTORS
        if not ends_well:
            raise zipfile.BadZipFile(f"its record {info.filename} does not end where the next one begins")
        offsets[info.header_offset] = begin
    return offsets


def _in_file(stub: TensorStub, offset: int) -> Place:
    storage = stub.storage
    seal = None if storage.crc is None else Seal(storage.path, storage.offset, storage.nbytes, storage.crc)
    return FileExtent(storage.path, offset, seal)


def to_tensor(stub: TensorStub, extent: Callable[[TensorStub, int], Place] = _in_file) -> Tensor:
    """The tensor of a stub, with its place in the file. Raises SourceError where it reaches outside of its storage.

    `extent` makes the place of the bytes that begin at a position of the file.
    """
    width = ITEMSIZE[stub.dtype]
    empty = 0 in stub.shape
    last = stub.offset + sum((n - 1) * s for n, s in zip(stub.shape, stub.stride, strict=True)) if not empty else -1
    negative = stub.offset < 0 or any(n < 0 for n in stub.shape) or any(s < 0 for s in stub.stride)
    if negative or (last + 1) * width > stub.storage.nbytes:
        raise SourceError(
            f"{stub.storage.path}: a tensor of shape {stub.shape} reaches outside of its storage {stub.storage.key}",
            why=f"the storage has {stub.storage.nbytes} bytes", hint="the file is damaged; copy it again",
        )  # fmt: skip
    if empty:
        return Tensor.at(Constant(b""), stub.shape, stub.dtype)
    base = extent(stub, stub.storage.offset + stub.offset * width)
    identity = (stub.storage.path, stub.storage.offset, stub.offset, stub.shape, stub.stride)
    if _is_packed(stub.shape, stub.stride):
        return Tensor.at(base, stub.shape, stub.dtype, storage=identity)
    place = Strided(base, stub.shape, stub.stride, stub.dtype)
    return Tensor.at(place, stub.shape, stub.dtype, storage=identity)


def _is_packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
