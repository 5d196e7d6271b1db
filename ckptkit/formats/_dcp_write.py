"""Laying out a DCP directory: one file a rank with a torch file for each chunk and object, and `.metadata` last.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py (2.13). The metadata is pickled from
torch's own classes.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.box import Box, shard, whole
from ..core.checkpoint import Contents
from ..core.flat_optimizer import flattened_optimizer, is_nested
from ..core.layout import Body, Layout, OutFile, Raw, Segment
from ..core.options import WriteOptions
from ..core.spec import Tensor, TensorKey
from ..core.tree import Path, Tree
from ..errors import LossError
from ..io.move import torch_dtype
from ..io.torch_layout import record_count, tensor_content, tensor_file, torch_file
from ._dcp_metadata import NOTE, Entry, Offsets
from ._dcp_note import note
from ._dcp_paths import keyed

_Leaves = Mapping[str, tuple[Path, Any]]


def layout(contents: Contents, options: WriteOptions) -> Layout:
    """The files of a directory for `options.ranks` ranks.

    Each tensor is split along its first dimension by the rule of `torch.chunk`, as FSDP does; 0-d tensors and objects
    are rank 0's. Raises LossError where two leaves of the tree would have one DCP key.
    """
    tree = _flat(contents.tree) if options.flat_optimizer else contents.tree
    leaves = _leaves(tree)
    files = [_RankFile(f"__{rank}_0.distcp") for rank in range(options.ranks)]
    entries: dict[tuple[str, Offsets | None], Entry] = {}
    chunks: dict[str, list[Box]] = {}
    for key, (_, value) in leaves.items():
        if not isinstance(value, Tensor):
            entries[key, None] = files[0].add(_object(key, value, files[0].records))
            continue
        boxes = _split(value, options.ranks)
        chunks[key] = [box for _, box in boxes]
        for rank, box in boxes:
            entries[key, box.offsets] = files[rank].add(_chunk(key, value, box, files[rank].records))
    metadata = Raw(_metadata(leaves, chunks, entries, note(tree, contents.facts)))
    written = [OutFile(file.name, tuple(file.segments)) for file in files if file.segments]
    return Layout((*written, OutFile(".metadata", (metadata,))))


def _flat(tree: Mapping[str, Tree]) -> dict[str, Tree]:
    return {name: flattened_optimizer(child) if is_nested(child) else child for name, child in tree.items()}


def _leaves(tree: Mapping[Any, Tree]) -> _Leaves:
    clashes: list[str] = []
    leaves = keyed(tree, clashes.append)
    if clashes:
        raise LossError(
            f"DCP cannot tell {len(clashes)} things of this checkpoint apart",
            why="it joins nested keys with dots and makes text of numbers, and two keys become one",
            hint="--to full holds them, or rename one",
            faults=clashes,
        )
    return leaves


class _RankFile:
    """The segments of one file so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.segments: list[Segment] = []
        self.records = 0
        self._size = 0

    def add(self, segments: Sequence[Segment]) -> Entry:
        """Append a torch file; where it lies."""
        entry = Entry(self.name, self._size, sum(segment.size for segment in segments))
        self.segments += segments
        self.records = record_count(segments)
        self._size += entry.length
        return entry


def _split(tensor: Tensor, ranks: int) -> list[tuple[int, Box]]:
    shape = tensor.spec.shape
    if not shape or not tensor.spec.numel:
        return [(0, whole(shape))]
    boxes = ((rank, shard(shape, 0, ranks, rank)) for rank in range(min(ranks, shape[0])))
    return [(rank, box) for rank, box in boxes if box is not None]


def _chunk(key: str, tensor: Tensor, box: Box, first_record: int) -> list[Segment]:
    dtype = tensor.spec.dtype

    def content(_: Any, record: int) -> Sequence[Segment]:
        return [Body(TensorKey(key), tensor, box, dtype, record)]

    return tensor_file(dtype, box.sizes, content, first_record=first_record)


def _object(key: str, value: Tree, first_record: int) -> list[Segment]:
    return torch_file(value, tensor_content(lambda tensor: TensorKey(key)), first_record=first_record)


def _metadata(
    leaves: _Leaves,
    chunks: Mapping[str, Sequence[Box]],
    entries: Mapping[tuple[str, Offsets | None], Entry],
    noted: Mapping[str, Any],
) -> bytes:
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    items: dict[str, Any] = {}
    for key, (_, value) in leaves.items():
        if not isinstance(value, Tensor):
            items[key] = BytesStorageMetadata()
            continue
        parts = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in chunks[key]]
        properties = TensorProperties(dtype=torch_dtype(value.spec.dtype))
        items[key] = TensorStorageMetadata(properties, torch.Size(value.spec.shape), parts)
    position = {(key, box.offsets): index for key, boxes in chunks.items() for index, box in enumerate(boxes)}
    storage = {}
    for (key, offsets), entry in entries.items():
        if offsets is None:
            where = MetadataIndex(key)
        else:
            where = MetadataIndex(key, torch.Size(offsets), position[key, offsets])
        storage[where] = _StorageInfo(entry.file, entry.offset, entry.length)
    metadata = Metadata(
        state_dict_metadata=items,
        planner_data={key: path for key, (path, _) in leaves.items()},
        storage_data=storage,
        storage_meta=StorageMeta(),
    )
    if noted:
        setattr(metadata, NOTE, dict(noted))
    return pickle.dumps(metadata)
