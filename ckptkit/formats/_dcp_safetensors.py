"""DCP's safetensors storage: each rank's shards under whole names, with their offsets in the header of the file.

Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py (2.13). A consolidated save keeps the shards in
`sharded/`; they are read, because consolidation writes 0-d tensors as zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..core.box import Box
from ..core.checkpoint import Contents
from ..core.spec import Piece, Tensor, TensorSpec
from ..errors import SourceError
from ..io.safetensors_file import SHARDING, read_file
from ._chunks import chunk_faults

_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")


def shard_files(path: Path) -> list[Path]:
    """The files of a directory (or of its `sharded/`) that hold shards, by their names."""
    for folder in (path, path / "sharded"):
        found = sorted(file for file in folder.glob("shard-*.safetensors") if _SHARD.fullmatch(file.name))
        if found:
            return found
    return []


def read(format: str, path: Path, files: list[Path], evidence: str) -> Contents:
    """One flat state dict of the shards of all files. Raises SourceError naming every fault."""
    names = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    ranks = {int(match.group(1)) for match in names}
    faults = [f"shard {rank} of at least {max(ranks)} is missing" for rank in range(1, max(ranks)) if rank not in ranks]
    pieces: dict[str, list[Piece]] = {}
    dtypes: dict[str, set[str]] = {}
    for file in files:
        tensors, metadata = read_file(file)
        offsets = _offsets(file, metadata)
        for name, tensor in tensors.items():
            if len(offsets.get(name, ())) != len(tensor.spec.shape):
                faults.append(f"{file.name} does not say where its part of {name} belongs")
                continue
            pieces.setdefault(name, [])
            dtypes.setdefault(name, set()).add(tensor.spec.dtype)
            if tensor.spec.numel:
                box = Box(offsets[name], tensor.spec.shape)
                pieces[name].append(Piece(box, tensor.pieces[0].place, tensor.spec.dtype))
    tree = {}
    whole_shapes = _consolidated_shapes(files[0].parent.parent) if files[0].parent.name == "sharded" else {}
    for name, parts in pieces.items():
        shape = (
            tuple(map(max, *(p.box.ends for p in parts))) if len(parts) > 1 else parts[0].box.ends if parts else (0,)
        )
        boxes = tuple(piece.box for piece in parts)
        faults += [f"{name}: {fault}" for fault in chunk_faults(whole_shapes.get(name, shape), boxes)]
        if len(dtypes[name]) > 1:
            faults.append(f"{name} has the dtypes {', '.join(sorted(dtypes[name]))}")
        unique = {piece.box: piece for piece in parts}
        tree[name] = Tensor(TensorSpec(shape, min(dtypes[name])), tuple(unique.values()))
    if faults:
        raise SourceError(
            f"{path} is not whole: {len(faults)} faults",
            why="shards are missing or damaged",
            hint="copy the files of all ranks",
            faults=faults,
        )
    warnings = () if whole_shapes else tuple(_unknown_end(ranks))
    return Contents(format, tree, evidence, len(ranks), warnings=warnings, facts={"ordered": False})


def _unknown_end(ranks: set[int]) -> Iterator[str]:
    yield (
        f"nothing in these files says how many ranks wrote them: if there were more than {max(ranks)}, the ends of the "
        "sharded tensors are missing"
    )


def _offsets(file: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    try:
        said = json.loads(metadata[SHARDING])
        found = {str(name): tuple(map(int, entry["saved_offsets"])) for name, entry in said.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            f"{file} does not say which shards it holds", why=f"no sound {SHARDING}", hint="copy it again"
        ) from error
    if any(n < 0 for offsets in found.values() for n in offsets):
        raise SourceError(
            f"{file} has negative offsets in {SHARDING}", why="its header is damaged", hint="copy it again"
        )
    return found


def _consolidated_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = sorted(file for file in folder.glob("*.safetensors"))
    return {name: tensor.spec.shape for file in files for name, tensor in read_file(file)[0].items()}
