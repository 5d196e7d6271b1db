"""Torch files, zip or legacy: shapes, dtypes and byte positions of every tensor, without its bytes.

Sources: torch/serialization.py `_save`, `_legacy_save`, `_load`, `_legacy_load`, and
caffe2/serialize/inline_container.cc (2.13).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

from ..core.dtype import ITEMSIZE
from ..core.place import Constant
from ..core.spec import Place, Tensor
from ..core.tree import Tree
from ..errors import SourceError
from .globals import Storage, StorageType, TensorStub
from .places import FileExtent, Strided
from .unpickle import as_tree, unpickle

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


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
    except (OSError, zipfile.BadZipFile):
        # A zip whose directory is gone is a truncated torch file: reading it says so.
        return os.path.isfile(path) and _starts_with(path, _ZIP_MAGIC)
    return head[:1] == b"\x80" and head[2:13] == b"\x8a\x0a" + _LEGACY_MAGIC.to_bytes(10, "little")[:9]


def _starts_with(path: str | os.PathLike[str], magic: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic


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
                    hint="the file is truncated; copy the checkpoint again",
                )
            return _load(io.BufferedReader(_Window(file, start, size)), name, start)
    except FileNotFoundError as error:
        raise SourceError(f"{name} does not exist", hint="check the path") from error
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
            raise SourceError(f"{name} ends early: storage {stub.storage.key} reaches beyond it", hint="copy it again")
        return Constant(memoryview(data)[offset:])

    return as_tree(raw, lambda stub: to_tensor(stub, extent))


def _load(window: io.BufferedReader[_Window], name: str, start: int) -> Any:
    if window.peek(4)[:4] == _ZIP_MAGIC:
        return _load_zip(window, name, start)
    return _load_legacy(window, name, start)


def _load_zip(file: io.BufferedReader[_Window], name: str, start: int) -> Any:
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise SourceError(
            f"{name} is a damaged torch file", why=str(error), hint="it is truncated; copy the checkpoint again"
        ) from error
    records = {info.filename.partition("/")[2] or info.filename: info for info in archive.infolist()}
    if "data.pkl" not in records:
        raise SourceError(f"{name} is a zip but no torch file", why="it has no data.pkl", hint="name another file")
    if "constants.pkl" in records:
        raise SourceError(
            f"{name} is a TorchScript archive",
            why="it holds a program, not a state dict",
            hint="load it with torch.jit.load and save its state_dict()",
        )
    if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
        raise SourceError(f"{name} was written on a big-endian machine", hint="save it again on a little-endian one")

    def storage(pid: Any) -> Storage:
        _, kind, key, _, numel = pid
        info = records.get(f"data/{key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise SourceError(f"{name} has no stored record data/{key}", hint="it is damaged; copy it again")
        dtype = _dtype_of(kind)
        nbytes = info.file_size
        if int(numel) * (ITEMSIZE[dtype] if dtype else 1) > nbytes:
            raise SourceError(f"{name}: record data/{key} holds {nbytes} bytes, less than its {numel} elements")
        return Storage(str(key), dtype, nbytes, name, start + _data_offset(file, info.header_offset))

    return unpickle(archive.read(records["data.pkl"]), name, persistent_load=storage)


def _data_offset(file: BinaryIO, header: int) -> int:
    file.seek(header)
    fields = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return header + _LOCAL_HEADER.size + fields[9] + fields[10]


def _dtype_of(kind: object) -> str | None:
    if isinstance(kind, StorageType):
        return kind.dtype
    raise ValueError(f"a storage of the unknown type {kind!r}")


def _load_legacy(file: io.BufferedReader[_Window], name: str, start: int) -> Any:
    """magic, protocol, system info, object and storage keys as five pickles, then every storage: count, bytes."""
    foreign = SourceError(
        f"{name} is no torch file", why="it starts with neither a zip header nor torch's magic number",
        hint="name another file, or --from another format",
    )  # fmt: skip
    if file.peek(1)[:1] != b"\x80" or unpickle(file, name) != _LEGACY_MAGIC:
        raise foreign
    unpickle(file, name)
    info = unpickle(file, name)
    if isinstance(info, dict) and not info.get("little_endian", True):
        raise SourceError(f"{name} was written on a big-endian machine", hint="save it again on a little-endian one")
    kinds: dict[str, tuple[str | None, int]] = {}
    offsets: dict[str, int] = {}

    def storage(pid: Any) -> Storage:
        if pid[0] != "storage":
            raise ValueError(f"a reference to {pid[0]!r}")
        _, kind, key, _, numel, view = (*pid, None)[:6]
        if view is not None:
            raise ValueError("a view of a storage, which torch has not written since 0.4")
        kinds[str(key)] = (_dtype_of(kind), int(numel))
        # Where it lies is known only once all keys are read: filled in below.
        return Storage(str(key), _dtype_of(kind), int(numel) * (ITEMSIZE[_dtype_of(kind) or "uint8"]), name, -1)

    value = unpickle(file, name, persistent_load=storage)
    at, end = None, None
    for key in unpickle(file, name):
        at = file.tell() if at is None else at
        file.seek(at)
        head = file.read(8)
        dtype, numel = kinds.get(str(key), ("uint8", 0))
        if len(head) < 8 or struct.unpack("<q", head)[0] != numel:
            raise SourceError(f"{name}: storage {key} is missing or has another length", hint="copy the file again")
        offsets[str(key)] = start + at + 8
        at += 8 + numel * ITEMSIZE[dtype or "uint8"]
        end = at
    file.seek(0, os.SEEK_END)
    if end is not None and end > file.tell():
        raise SourceError(f"{name} ends early", why=f"{end - file.tell()} bytes are missing", hint="copy it again")
    return _placed(value, offsets)


def _placed(value: Any, offsets: dict[str, int]) -> Any:
    """Legacy storages get their positions after the object was read."""

    def place(stub: TensorStub) -> TensorStub:
        old = stub.storage
        storage = Storage(old.key, old.dtype, old.nbytes, old.path, offsets[old.key])
        return TensorStub(storage, stub.dtype, stub.offset, stub.shape, stub.stride, stub.requires_grad)

    return replace_stubs(value, place)


def replace_stubs(value: Any, replace: Callable[[TensorStub], Any]) -> Any:
    """The same raw value with every `TensorStub` replaced, in containers and inside stand-ins."""
    from .standin import Standin

    if isinstance(value, TensorStub):
        return replace(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = replace_stubs(value[key], replace)
    elif isinstance(value, list):
        value[:] = [replace_stubs(child, replace) for child in value]
    elif isinstance(value, tuple):
        return tuple(replace_stubs(child, replace) for child in value)
    elif isinstance(value, Standin):
        for field in ("args", "state", "items", "elements"):
            value.__dict__[field] = replace_stubs(value.__dict__[field], replace)
    return value


def _in_file(stub: TensorStub, offset: int) -> Place:
    return FileExtent(stub.storage.path, offset)


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
