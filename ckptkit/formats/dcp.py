"""dcp: a directory of torch.distributed.checkpoint, as FSDP2, FSDP1 (sharded) and torchtitan write it.

What: `.metadata` (a pickle that lists every tensor with its chunks and the path of every key) and `.distcp` files, in
which each chunk or object is one small torch file. Read: every version since torch 1.13, saves without collectives
(`__R.metadata` only), zstd-compressed entries, and the safetensors storage of DCP (`shard-*-model-*.safetensors`).

Written: what `torch.distributed.checkpoint.load` of torch 2.6 to 2.13 loads into FSDP2, FSDP1 and plain modules: a file
for each of `--world-size` ranks, tensors split along their first dimension, `.metadata` last. Optimizer keys nest,
or with `--flat-optimizer` those of `flatten_optimizer_state_dict=True`.

Why it is checked: `.metadata` is a raw pickle, and torch follows `../` in it and loads chunks that are missing or
overlap without an error. Here each of these is an error that lists every case, and nothing that the pickle names is
imported.

Limits: DCP makes text of dict keys that are no text and forgets empty dicts. So do torch's loaders with what is written
here; ckptkit itself reads both back, and which names are tied, from a note in `.metadata`.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..core.checkpoint import Contents
from ..core.layout import Layout
from ..core.options import ReadOptions, WriteOptions
from ..errors import SourceError
from ..io.collector import collector_paused
from . import _dcp_read, _dcp_safetensors, _dcp_write

NAME = "dcp"
TARGETS = {
    "fsdp1": "a DCP directory, which FSDP1 loads with SHARDED_STATE_DICT",
    "fsdp2": "a DCP directory, which FSDP2 loads",
}
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")


def detect(path: Path) -> str | None:
    if not path.is_dir():
        return None
    ranks = _rank_metadata(path)
    files = sum(1 for _ in path.glob("*.distcp"))
    if (path / ".metadata").is_file():
        return f".metadata, {files} .distcp files"
    if ranks:
        return f"{len(ranks)} rank metadata files, {files} .distcp files"
    if files:
        return f"{files} .distcp files without .metadata"
    shards = _dcp_safetensors.shard_files(path)
    return f"{len(shards)} safetensors files of DCP shards" if shards else None


def _rank_metadata(path: Path) -> dict[int, Path]:
    found = ((_RANK_METADATA.fullmatch(file.name), file) for file in path.iterdir())
    return {int(match.group(1)): file for match, file in sorted(found, key=lambda p: p[1].name) if match}


def read(path: Path, options: ReadOptions) -> Contents:
    with collector_paused():
        return _read(path)


def _read(path: Path) -> Contents:
    evidence = detect(path) or "named by --from"
    if (path / ".metadata").is_file():
        return _dcp_read.read(NAME, path, path / ".metadata", evidence)
    ranks = _rank_metadata(path)
    if ranks:
        return _dcp_read.read_ranks(NAME, path, ranks, evidence)
    shards = _dcp_safetensors.shard_files(path)
    if shards and not any(path.glob("*.distcp")):
        return _dcp_safetensors.read(NAME, path, shards, evidence)
    raise SourceError(
        f"{path} has no .metadata",
        why="DCP writes it last: this save did not finish, or the file was not copied (its name begins with a dot)",
        hint="copy .metadata too, or take an earlier checkpoint",
    )


def layout(contents: Contents, options: WriteOptions) -> Layout:
    with collector_paused():
        return _dcp_write.layout(contents, options)
