"""Torch files from before 1.6 (or saved without zip): pickles, then every storage with its length before it.

Source: torch/serialization.py `_legacy_save` and `_legacy_load` (2.13).
"""

from __future__ import annotations

import io
import os
import struct
from typing import Any

from ..core.dtype import ITEMSIZE
from ..errors import SourceError
from .globals import Storage, dtype_of
from .unpickle import unpickle

MAGIC = 0x1950A86A20F9469CFC6C
ENDIAN = "the bytes of every number are in the other order"
ENDIAN_HINT = "save it again on a little-endian machine"


def load_legacy(file: io.BufferedReader[Any], name: str, start: int) -> Any:
    """What the object's pickle says. The file is: magic, protocol, system info, object, storage keys, storages.

    Where a storage lies stands behind the object that names it, so the object's pickle is read twice: once for the
    storages' types and lengths, once with their positions. Raises SourceError, UnsafePickleError.
    """
    if file.peek(1)[:1] != b"\x80" or unpickle(file, name) != MAGIC:
        raise SourceError(
            f"{name} is no torch file",
            why="it starts with neither a zip header nor torch's magic number",
            hint="name another file, or --from another format",
        )
    unpickle(file, name)
    info = unpickle(file, name)
    if isinstance(info, dict) and not info.get("little_endian", True):
        raise SourceError(f"{name} was written on a big-endian machine", why=ENDIAN, hint=ENDIAN_HINT)
    begin = file.tell()
    kinds: dict[str, tuple[str | None, int]] = {}

    def first(pid: Any) -> Storage:
        key, dtype, numel = _said(pid)
        kinds[key] = (dtype, numel)
        return Storage(key, dtype, numel * ITEMSIZE[dtype or "uint8"], name, 0)

    unpickle(file, name, persistent_load=first)
    offsets = _offsets(file, name, unpickle(file, name), kinds)

    def second(pid: Any) -> Storage:
        key, dtype, numel = _said(pid)
        return Storage(key, dtype, numel * ITEMSIZE[dtype or "uint8"], name, start + offsets[key])

    file.seek(begin)
    return unpickle(file, name, persistent_load=second)


def _said(pid: Any) -> tuple[str, str | None, int]:
    """Key, element type and length of a storage. Raises ValueError for a reference of another kind."""
    if pid[0] != "storage":
        raise ValueError(f"a reference to {pid[0]!r}")
    _, kind, key, _, numel, view = (*pid, None)[:6]
    if view is not None:
        raise ValueError("a view of a storage, which torch has not written since 0.4")
    if int(numel) < 0:
        raise ValueError(f"a storage of {numel} elements")
    return str(key), dtype_of(kind), int(numel)


def _offsets(
    file: io.BufferedReader[Any], name: str, keys: Any, kinds: dict[str, tuple[str | None, int]]
) -> dict[str, int]:
    """Where the bytes of each storage begin. Raises SourceError where one is missing or cut off."""
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    offsets: dict[str, int] = {}
    for key in keys if isinstance(keys, list) else []:
        dtype, numel = kinds.get(str(key), ("uint8", 0))
        file.seek(at)
        head = file.read(8)
        if len(head) < 8 or struct.unpack("<q", head)[0] != numel:
            raise SourceError(
                f"{name}: storage {key} is missing or has another length",
                why="the file is truncated or was changed",
                hint="copy the file again",
            )
        offsets[str(key)] = at + 8
        at += 8 + numel * ITEMSIZE[dtype or "uint8"]
    if at > size:
        raise SourceError(f"{name} ends early", why=f"{at - size} bytes are missing", hint="copy it again")
    missing = sorted(set(kinds) - set(offsets))
    if missing:
        raise SourceError(
            f"{name} names storages that it does not hold",
            why="the file was changed",
            hint="copy the file again",
            faults=missing[:20],
        )
    return offsets
