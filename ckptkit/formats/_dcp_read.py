"""Reading a DCP directory: every entry checked against its file, every tensor against its chunks, then the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.checkpoint import Contents
from ..core.spec import Piece, Tensor, TensorSpec
from ..core.tree import Opaque, Tree, walk
from ..errors import SourceError
from ._chunks import chunk_faults
from ._dcp_entries import EntryPlace, load_entry
from ._dcp_metadata import Entry, Index, Item, read_index
from ._dcp_note import facts, restored
from ._dcp_paths import nested

_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_SHARDED = ("ShardedTensor", "DTensor", "LocalShardsWrapper")


def read(format: str, root: Path, metadata: Path, evidence: str) -> Contents:
    """The contents of a directory with one `.metadata`. Raises SourceError naming every fault."""
    index = read_index(metadata)
    _check(root, [index])
    leaves = {key: _leaf(root, index, key, item) for key, item in index.items.items()}
    return _contents(format, root, index, leaves, evidence)


def read_ranks(format: str, root: Path, files: Mapping[int, Path], evidence: str) -> Contents:
    """The contents of a directory that was saved without collectives: one `.metadata` a rank, each with its own part.

    Tensors are put together from all ranks. Objects that differ from rank to rank (RNG states) become
    `{"rank_0": ..., "rank_1": ...}`.
    """
    missing = sorted(set(range(max(files) + 1)) - set(files))
    if missing:
        raise SourceError(
            f"{root} lacks the metadata of {len(missing)} ranks",
            why="it was saved without collectives: every rank's file holds a part that no other has",
            hint="copy the files of all ranks",
            faults=[f"__{rank}.metadata is missing" for rank in missing],
        )
    indexes = [read_index(files[rank]) for rank in sorted(files)]
    _check(root, indexes)
    merged = _merged(indexes)
    leaves: dict[str, Tree] = {}
    for key, item in merged.items.items():
        if item.shape is not None:
            leaves[key] = _leaf(root, merged, key, item)
            continue
        values = {
            f"rank_{rank}": load_entry(root, index.entries[key, None])
            for rank, index in enumerate(indexes)
            if key in index.items
        }
        leaves[key] = _one_or_all(values)
    return _contents(format, root, merged, leaves, evidence, world_size=len(files))


def _merged(indexes: list[Index]) -> Index:
    items: dict[str, Item] = {}
    entries: dict[Any, Entry] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for index in indexes:
        for key, item in index.items.items():
            old = items.get(key, item)
            if (old.shape, old.dtype) != (item.shape, item.dtype):
                raise SourceError(
                    f"{index.source} says {item.shape} {item.dtype} of {key}, another rank {old.shape}",
                    why="the ranks' metadata are not of one save",
                    hint="restore the files of one step",
                )
            # Replicas stand in every rank's file; one of them is enough.
            items[key] = Item(item.shape, item.dtype, tuple(dict.fromkeys((*old.chunks, *item.chunks))))
        entries = {**index.entries, **entries}
        paths = {**paths, **index.paths}
    return Index(indexes[0].source, items, entries, paths, indexes[0].keys_are_text)


def _one_or_all(values: dict[str, Tree]) -> Tree:
    first, *rest = values.values()
    plain = not any(isinstance(leaf, Tensor) for value in values.values() for _, leaf in walk(value))
    return first if plain and all(list(walk(first)) == list(walk(value)) for value in rest) else values


def _contents(
    format: str, root: Path, index: Index, leaves: Mapping[str, Tree], evidence: str, world_size: int | None = None
) -> Contents:
    _refuse_unsaved(root, leaves)
    # The order of the state dict is that of the paths; items are in the order in which ranks wrote them.
    order = [*(key for key in index.paths if key in leaves), *(key for key in leaves if key not in index.paths)]
    tree = nested(
        ((key, index.paths.get(key, (key,)), leaves[key]) for key in order), keys_are_text=index.keys_are_text
    )
    names = (_DATA_FILE.fullmatch(entry.file) for entry in index.entries.values())
    ranks = {int(name.group(1)) for name in names if name}
    try:
        tree, known = restored(tree, index.note), facts(index.note)
    except (TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"the note in {index.source} is damaged", why=str(error), hint="copy it again") from error
    return Contents(format, tree, evidence, world_size or len(ranks) or None, facts=known)


def _leaf(root: Path, index: Index, key: str, item: Item) -> Tree:
    if item.shape is None:
        return load_entry(root, index.entries[key, None])
    pieces = tuple(
        Piece(box, EntryPlace(root, index.entries[key, box.offsets], box.sizes, item.dtype, key), item.dtype)
        for box in dict.fromkeys(item.chunks)
        if box.numel
    )
    return Tensor(TensorSpec(item.shape, item.dtype), pieces)


def _refuse_unsaved(root: Path, leaves: Mapping[str, Tree]) -> None:
    faults = [
        f"{'.'.join(map(str, (key, *path)))} is a {value.kind.rpartition('.')[2]} inside an object"
        for key, leaf in leaves.items()
        if not isinstance(leaf, Tensor)
        for path, value in walk(leaf)
        if isinstance(value, Opaque) and value.kind.rpartition(".")[2] in _SHARDED
    ]
    if faults:
        raise SourceError(
            f"{root} is incomplete: the shards of {len(faults)} tensors are those of one rank only",
            why="torch before 2.0 did not look into nested state dicts: rank 0's part was saved as an object, and "
            "those of the other ranks nowhere",
            hint="take a checkpoint that was saved with a flat state dict",
            faults=faults[:50],
        )


def _check(root: Path, indexes: list[Index]) -> None:
    """Raise SourceError naming every file that is missing or short, every chunk without an entry, every bad cover."""
    sizes: dict[str, int | None] = {}
    faults = [fault for index in indexes for fault in _entry_faults(root, index, sizes)]
    index = indexes[0] if len(indexes) == 1 else _merged(indexes)
    for key, item in index.items.items():
        if item.shape is not None:
            faults += [f"{key}: {fault}" for fault in chunk_faults(item.shape, item.chunks)]
    if faults:
        raise SourceError(
            f"{root} is not whole: {len(faults)} faults",
            why="files are missing, truncated or of another save, or .metadata is damaged",
            hint="restore the files named, or take an earlier checkpoint",
            faults=faults,
        )


def _entry_faults(root: Path, index: Index, sizes: dict[str, int | None]) -> Iterator[str]:
    lacking: set[str] = set()
    for key, item in index.items.items():
        wanted = [None] if item.shape is None else [box.offsets for box in item.chunks if box.numel]
        for offsets in wanted:
            entry = index.entries.get((key, offsets))
            if entry is None:
                yield f"{key}: no file holds its " + ("object" if offsets is None else f"chunk at {offsets}")
                continue
            if entry.file not in sizes:
                path = root / entry.file
                sizes[entry.file] = path.stat().st_size if path.is_file() else None
            size = sizes[entry.file]
            if size is None:
                if entry.file not in lacking:
                    yield f"{entry.file} is missing"
                lacking.add(entry.file)
            elif entry.offset + entry.length > size:
                yield f"{key}: bytes {entry.offset} to {entry.offset + entry.length} of {entry.file}, which has {size}"
