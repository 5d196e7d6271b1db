"""The header of a safetensors file: every tensor's dtype, shape and byte range, checked against the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.spec import Tensor
from ..errors import SourceError
from .places import FileExtent

DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
SHARDING = "DCP_SHARDING_INFO"
"""In the metadata of a file that DCP wrote: its names are whole, its tensors are shards."""

_LIMIT = 100_000_000  # bytes of a header, as in the safetensors library


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, and its metadata. Raises SourceError for a damaged file or an unknown dtype."""
    header, base, size = read_header(path)
    metadata = header.pop("__metadata__", {})
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            start, end = map(int, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(
                f"{path}: the header says nothing sound of {name}",
                why=repr(error),
                hint="the file is damaged; copy it again",
            ) from error
        tensor = Tensor.at(FileExtent(str(path), base + start), shape, dtype)
        if start < 0 or end - start != tensor.spec.nbytes or base + end > size or any(n < 0 for n in shape):
            raise SourceError(
                f"{path}: {name} does not fit the file",
                why=f"bytes {start} to {end} of {size - base}, shape {shape}, dtype {dtype}",
                hint="the file is truncated or damaged; copy it again",
            )
        tensors[name] = tensor
    return tensors, metadata if isinstance(metadata, dict) else {}


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The JSON header, the offset of the data and the size of the file. Raises SourceError for a damaged file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(size - 8, _LIMIT):
            raise SourceError(
                f"{path} is no whole safetensors file",
                why="its header is longer than the file",
                hint="it is truncated; copy it again",
            )
        try:
            header = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise ValueError("the header is no object")
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{path} is no safetensors file", why=str(error), hint="copy it again") from error
    return header, 8 + length, size
