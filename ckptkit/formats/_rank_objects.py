"""What stands for a rank's part of a tensor in its file: a DTensor or a ShardedTensor, as torch pickles them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..core.box import Box, Shape, shard
from ..core.gather import packed_strides
from ..core.layout import Body
from ..core.spec import Tensor, TensorKey
from ..errors import UsageError
from ..io.move import torch_dtype
from ..io.pickle_out import Call, Global, StorageSlice

_WRAP = Global("torch._utils", "_rebuild_wrapper_subclass")
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_DTENSOR = Global("torch.distributed.tensor", "DTensor")
_SHARDED = Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
_SHARD = Global("torch.distributed._shard.sharded_tensor.shard", "Shard")


@dataclass(frozen=True, slots=True)
class Part:
    """What a storage of a rank's file holds: a box of a tensor (of no rows where the rank has none), named for
    messages."""

    name: str
    tensor: Tensor
    box: Box

    @property
    def slice(self) -> StorageSlice:
        return StorageSlice(self, self.tensor.spec.dtype, self.box.numel, self.box.sizes)

    def segments(self, record: int) -> Iterator[Body]:
        yield Body(TensorKey(self.name), self.tensor, self.box, self.tensor.spec.dtype, record)


def mesh_of(text: str, rank: int, ranks: int) -> Any:
    """The device mesh `type[:name]` over all ranks, as rank `rank` sees it. No process group is needed.

    Raises UsageError where the installed torch cannot make a mesh without one.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if "_rank" not in inspect.signature(DeviceMesh.__init__).parameters:
        raise UsageError(
            "this torch cannot make a device mesh without a process group, so DTensors cannot be written",
            why="a DTensor file holds its mesh",
            hint="write with a newer torch, or --to dcp, which every torch loads",
        )
    device, _, name = text.partition(":")
    names = (name,) if name else None
    mesh = DeviceMesh(device, torch.arange(ranks), mesh_dim_names=names, _init_backend=False, _rank=rank)
    # A mesh over all ranks uses the default process group, whose name is "0" in every torch: optimizer states keep the
    # mesh that they were loaded with, and communicate over it.
    setattr(mesh, "_dim_group_names", ["0"])  # noqa: B010
    return mesh


def _wrapped(kind: Global, dtype: str, shape: Shape, state: Any) -> Call:
    # class, dtype, size, stride, storage offset, layout, device, requires_grad. On the CPU whatever the mesh is of, as
    # `offload_to_cpu` leaves them: who loads it moves it.
    args = (kind, torch_dtype(dtype), shape, packed_strides(shape), 0, torch.strided, torch.device("cpu"), False)
    return Call(_FROM_TYPE, (_WRAP, kind, args, state))


def dtensor(part: Part, mesh: Any) -> Call:
    """A DTensor of the part, split along its first dimension over the mesh."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = part.tensor.spec
    meta = TensorMeta(torch.Size(spec.shape), packed_strides(spec.shape), torch_dtype(spec.dtype))
    state = {"_local_tensor": part.slice, "_spec": DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)}
    return _wrapped(_DTENSOR, spec.dtype, spec.shape, (None, state))


def sharded_tensor(part: Part, rank: int, ranks: int, device: str) -> Call:
    """A ShardedTensor of the part."""
    return chunk_sharded(part.slice, part.tensor.spec.shape, rank, ranks, device)


def chunk_sharded(own: StorageSlice, shape: Shape, rank: int, ranks: int, device: str) -> Call:
    """A ShardedTensor of `shape` in chunks of its first dimension: this rank's `own` (of no elements where it has
    none), and the metadata of all (`_create_chunk_sharded_tensor`)."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

    boxes = [shard(shape, 0, ranks, each) for each in range(ranks)]
    shards = [
        ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{each}/{_device(device, each)}")
        for each, box in enumerate(boxes)
        if box is not None
    ]
    properties = TensorProperties(dtype=torch_dtype(own.dtype))
    metadata = ShardedTensorMetadata(shards, torch.Size(shape), properties)
    group = ShardedTensor.ProcessGroupState(rank, rank, ranks, ranks)
    held = [Call(_SHARD, (own, shards[rank]))] if math.prod(own.shape) else []
    return _wrapped(_SHARDED, own.dtype, shape, (held, metadata, group, EnumerableShardingSpec(shards), False))


def _device(device: str, rank: int) -> str:
    return device if device == "cpu" else f"{device}:{rank}"
