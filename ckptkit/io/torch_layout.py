"""Lay out a torch file: the zip that `torch.save` would write, every offset known before a tensor byte is read.

Source: caffe2/serialize/inline_container.cc (2.13): stored records, 64-byte alignment through an `FB` extra field.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.box import whole
from ..core.layout import Body, Fill, Late, Raw, Segment
from ..core.spec import Tensor, TensorKey
from ..core.tree import Tree
from .pickle_out import StorageSlice, torch_pickle

_ALIGN = 64
_LIMIT = 0xFFFFFFFF
_DATE = (0 << 9 | 1 << 5 | 1) << 16  # 1980-01-01: the same checkpoint gives the same bytes

Content = Callable[[Any, int], Sequence[Segment]]
"""Makes the segments of a storage, given the object that stands for it and the number of its record."""


@dataclass(frozen=True, slots=True)
class _Record:
    name: bytes
    size: int
    segments: tuple[Segment, ...]
    offset: int = 0
    header: int = 0


def tensor_content(label: Callable[[Tensor], TensorKey]) -> Content:
    """Storages that are whole tensors, each named for messages by `label`."""

    def content(storage: Any, record: int) -> Sequence[Segment]:
        return [Body(label(storage), storage, whole(storage.spec.shape), storage.spec.dtype, record)]

    return content


def torch_file(tree: Tree, content: Content, *, root: str = "archive", first_record: int = 0) -> list[Segment]:
    """The segments of a torch file that holds `tree`.

    Tensors of the tree that are one object share one storage. Record numbers (for checksums) start at `first_record`,
    so that several torch files can lie in one file. Raises nothing: the tree must hold no `Opaque` or `TensorRef`.
    """
    pickle, storages = _pickled(tree)
    return _laid_out(pickle, storages, content, root, first_record)


def torch_files(tree: Tree, parts: Iterable[tuple[str, Content]]) -> Iterator[list[Segment]]:
    """The segments of files that hold the same tree with other bytes (one a rank), each by its root and content.

    The tree is pickled once: storages have the same sizes in all of them.
    """
    pickle, storages = _pickled(tree)
    for root, content in parts:
        yield _laid_out(pickle, storages, content, root, 0)


def _pickled(tree: Tree) -> tuple[bytes, list[Any]]:
    """The pickle, and the objects that stand for its storages in the order of their records."""
    keys: dict[int, str] = {}
    storages: list[Any] = []

    def key_of(storage: Any) -> str:
        if id(storage) not in keys:
            keys[id(storage)] = str(len(storages))
            storages.append(storage)
        return keys[id(storage)]

    return torch_pickle(tree, key_of), storages


@functools.lru_cache(maxsize=4096)
def _tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    return torch_pickle(StorageSlice(None, dtype, math.prod(shape), shape), lambda storage: "0")


def tensor_file(dtype: str, shape: tuple[int, ...], content: Content, *, first_record: int = 0) -> list[Segment]:
    """The segments of a torch file that holds one tensor: `torch_file` of it, made once for each dtype and shape."""
    return _laid_out(_tensor_pickle(dtype, shape), [None], content, "archive", first_record)


def _laid_out(pickle: bytes, storages: Sequence[Any], content: Content, root: str, first_record: int) -> list[Segment]:
    numbers = itertools.count(first_record)
    parts: list[tuple[str, Sequence[Segment]]] = [("data.pkl", [Raw(pickle, next(numbers))])]
    parts += [(".format_version", [Raw(b"1", next(numbers))]), (".storage_alignment", [Raw(b"64", next(numbers))])]
    parts.append(("byteorder", [Raw(b"little", next(numbers))]))
    parts += [(f"data/{index}", content(storage, next(numbers))) for index, storage in enumerate(storages)]
    parts.append(("version", [Raw(b"3\n", next(numbers))]))
    identity = str(int(hashlib.sha256(pickle).hexdigest()[:31], 16)).zfill(40).encode()
    parts.append((".data/serialization_id", [Raw(identity, next(numbers))]))
    return list(_zip([(f"{root}/{name}".encode(), segments) for name, segments in parts], first_record))


def record_count(segments: Sequence[Segment]) -> int:
    """How many record numbers the segments use: where the next torch file of the same file starts."""
    used = [s.record for s in segments if isinstance(s, Raw | Body | Fill) and s.record is not None]
    return max(used, default=-1) + 1


def _zip(parts: Sequence[tuple[bytes, Sequence[Segment]]], first_record: int) -> Iterator[Segment]:
    records: list[_Record] = []
    offset = 0
    for number, (name, segments) in enumerate(parts, first_record):
        size = sum(segment.size for segment in segments)
        header = _header_size(name, size, offset)
        record = _Record(name, size, tuple(segments), offset, header)
        records.append(record)
        yield _late_or_raw(record, number)
        yield from segments
        offset += header + size
    yield _directory(records, offset, first_record)


def _header_size(name: bytes, size: int, offset: int) -> int:
    bare = 30 + len(name) + (20 if size >= _LIMIT else 0)
    return bare + 4 + (-(offset + bare + 4)) % _ALIGN


def _late_or_raw(record: _Record, number: int) -> Segment:
    def make(checksums: Mapping[int, int]) -> bytes:
        return _local_header(record, checksums.get(number, 0))

    known = [segment for segment in record.segments if isinstance(segment, Raw)]
    if len(known) == len(record.segments):
        return Raw(_local_header(record, zlib.crc32(b"".join(segment.data for segment in known))))
    return Late(record.header, make)


def _local_header(record: _Record, checksum: int) -> bytes:
    big = record.size >= _LIMIT
    size = _LIMIT if big else record.size
    extra = struct.pack("<HHQQ", 1, 16, record.size, record.size) if big else b""
    padding = record.header - 30 - len(record.name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    fixed = struct.pack(
        "<4sHHHIIIIHH", b"PK\x03\x04", 45 if big else 20, 0x0800, 0, _DATE, checksum, size, size, len(record.name),
        len(extra),
    )  # fmt: skip
    return fixed + record.name + extra


def _directory(records: Sequence[_Record], start: int, first_record: int) -> Late:
    def make(checksums: Mapping[int, int]) -> bytes:
        entries = b"".join(
            _entry(record, checksums.get(number, 0)) for number, record in enumerate(records, first_record)
        )
        return entries + _end(len(records), len(entries), start)

    return Late(len(make({})), make)


def _entry(record: _Record, checksum: int) -> bytes:
    wide = [value for value in (record.size, record.size, record.offset) if value >= _LIMIT]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, offset = min(record.size, _LIMIT), min(record.offset, _LIMIT)
    fixed = struct.pack(
        "<4sHHHHIIIIHHHHHII", b"PK\x01\x02", 45, 45 if wide else 20, 0x0800, 0, _DATE, checksum, size, size,
        len(record.name), len(extra), 0, 0, 0, 0, offset,
    )  # fmt: skip
    return fixed + record.name + extra


def _end(count: int, size: int, start: int) -> bytes:
    tail = b""
    if count >= 0xFFFF or start >= _LIMIT or size >= _LIMIT:
        tail = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    low_count = min(count, 0xFFFF)
    return tail + struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, low_count, low_count, min(size, _LIMIT), min(start, _LIMIT), 0
    )
