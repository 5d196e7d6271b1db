"""DCP's `.metadata` as plain records: which items there are, their chunks, and the entry of a file that holds each.

Sources: torch/distributed/checkpoint/metadata.py and filesystem.py (2.13), and files written by torch 1.13 to 2.6.
The pickle is read with stand-ins: no class that it names is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..core.box import Box
from ..core.dtype import ITEMSIZE
from ..core.tree import Path as TreePath
from ..errors import SourceError
from ..io.standin import Standin, kind_of
from ..io.unpickle import unpickle

Offsets = tuple[int, ...]
NOTE = "ckptkit"  # an attribute of `Metadata` that only ckptkit writes and reads


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one item or chunk lies: `length` bytes at `offset` of a file below the directory."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor (`shape`, `dtype`, `chunks`) or, where `shape` is None, an object saved as bytes."""

    shape: tuple[int, ...] | None = None
    dtype: str = ""
    chunks: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Index:
    """What one `.metadata` file says. `entries` is keyed by item and, for a tensor's chunk, its offsets.

    `paths` has the position of every key in the state dict that was saved; it is empty where the planner noted none.
    `keys_are_text` says that torch turned all dict keys into text, so that an integer in a path is a list index (2.4).
    """

    source: str
    items: Mapping[str, Item]
    entries: Mapping[tuple[str, Offsets | None], Entry]
    paths: Mapping[str, TreePath] = field(default_factory=dict)
    keys_are_text: bool = True
    note: Mapping[str, Any] = field(default_factory=dict)


def read_index(path: Path) -> Index:
    """Parse a `.metadata` file. Raises SourceError naming every item that it describes wrongly, UnsafePickleError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot read {path}", why=str(error), hint="check that it is a readable file") from error
    value = unpickle(data, str(path))
    if not kind_of(value).endswith("checkpoint.metadata.Metadata"):
        raise SourceError(
            f"{path} is no DCP metadata",
            why=f"it holds a {kind_of(value) or type(value).__name__}",
            hint="name the folder that torch.distributed.checkpoint wrote",
        )
    faults: list[str] = []
    items = {}
    for key, raw in _mapping(value, "state_dict_metadata").items():
        try:
            items[str(key)] = _item(raw)
        except (TypeError, ValueError, AttributeError) as error:
            faults.append(f"{key}: {error}")
    entries = {}
    for where, raw in _mapping(value, "storage_data").items():
        try:
            entries[_where(where)] = _entry(raw)
        except (TypeError, ValueError, AttributeError) as error:
            faults.append(f"{kind_of(where) or where}: {error}")
    if faults:
        raise SourceError(
            f"{path} describes {len(faults)} items wrongly",
            why="the file is damaged or was made by hand",
            hint="copy it again",
            faults=faults[:50],
        )
    paths = {str(key): tuple(parts) for key, parts in _mapping(value, "planner_data").items()}
    return Index(str(path), items, entries, paths, value.attribute("storage_meta") is not None, _mapping(value, NOTE))


def _mapping(value: Standin, name: str) -> Mapping[Any, Any]:
    found = value.attribute(name)
    return found if isinstance(found, dict) else {}


def _item(raw: Standin) -> Item:
    kind = kind_of(raw).rpartition(".")[2]
    if kind == "BytesStorageMetadata":
        return Item()
    if kind != "TensorStorageMetadata":
        raise ValueError(f"an item of the unknown kind {kind or type(raw).__name__}")
    properties = raw.attribute("properties")
    # `TensorProperties.__getstate__` gives a tuple that begins with the dtype, in every version.
    state = properties.state if isinstance(properties, Standin) else None
    dtype = state[0] if isinstance(state, tuple) and state else properties.attribute("dtype")
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else str(dtype)
    if name not in ITEMSIZE:
        raise ValueError(f"an unknown dtype {name}")
    shape = _sizes(raw.attribute("size"))
    chunks = tuple(Box(_sizes(c.attribute("offsets")), _sizes(c.attribute("sizes"))) for c in raw.attribute("chunks"))
    return Item(shape, name, chunks)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
        raise ValueError(f"{value!r} where sizes or offsets should be")
    if any(n < 0 for n in value):
        raise ValueError(f"negative sizes or offsets {value!r}")
    return tuple(value)


def _where(value: Standin) -> tuple[str, Offsets | None]:
    offsets = value.attribute("offset")
    return str(value.attribute("fqn")), None if offsets is None else _sizes(offsets)


def _entry(raw: Standin) -> Entry:
    file, offset, length = (raw.attribute(name) for name in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or not isinstance(offset, int) or not isinstance(length, int):
        raise ValueError("an entry without a file, an offset or a length")
    parts = PurePosixPath(file)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ValueError(f"its file {file!r} lies outside of the checkpoint")
    if offset < 0 or length < 0:
        raise ValueError(f"an entry at {offset} of {length} bytes in {file}")
    return Entry(file, offset, length, tuple(map(str, raw.attribute("transform_descriptors") or ())))
