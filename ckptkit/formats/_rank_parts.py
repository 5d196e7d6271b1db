"""One rank's file as a tree whose leaves say which boxes of which tensors the rank holds.

Sources: `DTensor`, `DeviceMesh` and `ShardedTensor` as torch 2.13 pickles them (torch/distributed/tensor/_api.py,
device_mesh.py, _shard/sharded_tensor/api.py), and files of torch 1.13 to 2.6. None of these classes is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.box import Box, Shape, shard, whole
from ..core.spec import Tensor
from ..core.tree import Tree
from ..errors import SourceError
from ..io.globals import TensorStub
from ..io.standin import Standin, kind_of
from ..io.torch_file import load_raw, to_tensor
from ..io.unpickle import as_tree


@dataclass(frozen=True, slots=True)
class Sharded:
    """A rank's parts of one tensor of `shape`: boxes and what is stored for each. `rank` and `world_size` are what the
    file itself says of its rank, where it does."""

    shape: Shape
    dtype: str
    parts: tuple[tuple[Box, Tensor], ...]
    rank: int | None = None
    world_size: int | None = None


def load_parts(path: Path) -> Tree:
    """The tree of one rank's file, DTensors and ShardedTensors as `Sharded`. Raises SourceError, UnsafePickleError."""
    return as_tree(_replaced(load_raw(path), lambda standin: _sharded(standin, path)), to_tensor)


def _replaced(value: Any, sharded: Callable[[Standin], Sharded | None]) -> Any:
    if isinstance(value, Standin):
        found = sharded(value)
        if found is not None:
            return found
        value.items.update({key: _replaced(child, sharded) for key, child in value.items.items()})
        return value
    if isinstance(value, dict):
        for key in value:
            value[key] = _replaced(value[key], sharded)
    elif isinstance(value, list):
        value[:] = [_replaced(child, sharded) for child in value]
    elif isinstance(value, tuple):
        return tuple(_replaced(child, sharded) for child in value)
    return value


def _sharded(value: Standin, path: Path) -> Sharded | None:
    """What a stand-in for a sharded tensor holds; None for any other object."""
    name = kind_of(value).rpartition(".")[2]
    try:
        if name == "DTensor":
            return _dtensor(value)
        if name == "ShardedTensor":
            return _sharded_tensor(value)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise SourceError(
            f"{path} holds a {name} of a form that is not known",
            why=str(error),
            hint="save it through torch.distributed.checkpoint, or with a full state dict",
        ) from error
    return None


def _dtensor(value: Standin) -> Sharded:
    local, spec = value.attribute("_local_tensor"), value.attribute("_spec")
    if not isinstance(local, TensorStub) or not isinstance(spec, Standin):
        raise ValueError("it has no local tensor or no spec")
    # args: dtype, size, stride, ...
    shape = tuple(map(int, value.args[1]))
    ranks, sizes, coordinate = _mesh(spec.attribute("mesh"))
    rank = ranks[sum(c * math.prod(sizes[i + 1 :]) for i, c in enumerate(coordinate))]
    box = _box(shape, sizes, coordinate, spec)
    stored = to_tensor(local)
    expected = box.sizes if box is not None else None
    if stored.spec.shape != expected and (expected is not None or stored.spec.numel):
        raise ValueError(f"rank {rank} of a mesh of {sizes} holds {stored.spec.shape} of {shape} instead of {expected}")
    parts = ((box, stored),) if box is not None and box.numel else ()
    return Sharded(shape, stored.spec.dtype, parts, rank, max(ranks) + 1)


def _mesh(mesh: Standin) -> tuple[tuple[int, ...], Shape, Shape]:
    """The ranks of a device mesh in row-major order, its shape, and this rank's coordinate in it."""
    ranks = mesh.attribute("_flatten_rank_map") or mesh.attribute("_flatten_mesh_list")
    coordinate = mesh.attribute("_coordinate_on_dim")
    layout, array = mesh.attribute("_layout"), mesh.attribute("mesh")
    if isinstance(array, TensorStub):
        sizes = array.shape
    else:
        axes = layout.attribute("axes")
        sizes = tuple(math.prod(a.attribute("shape")) for a in axes) if axes else _flat_sizes(layout)
    if ranks is None or coordinate is None or math.prod(sizes) != len(ranks):
        raise ValueError("its device mesh does not say which ranks it has")
    return tuple(map(int, ranks)), sizes, tuple(map(int, coordinate))


def _flat_sizes(layout: Standin) -> Shape:
    shape = layout.attribute("shape", layout.args[0] if layout.args else ())
    return tuple(math.prod(n) if isinstance(n, tuple) else int(n) for n in shape)


def _box(shape: Shape, sizes: Shape, coordinate: Shape, spec: Standin) -> Box | None:
    """This rank's box: each mesh dimension in turn splits what the ones before it left, by the rule of torch.chunk."""
    box = whole(shape)
    if spec.attribute("use_strided_shard_as_shard_order") or not _in_order(spec.attribute("shard_order") or ()):
        raise ValueError("its dimensions are split in another order than that of the mesh")
    for size, index, placement in zip(sizes, coordinate, spec.attribute("placements"), strict=True):
        kind = kind_of(placement).rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind != "Shard":
            raise ValueError(f"a placement of the kind {kind or placement!r} is not carried")
        dim = int(placement.attribute("dim", placement.args[0] if placement.args else None)) % len(shape)
        part = shard(box.sizes, dim, size, index)
        if part is None:
            return None
        box = Box(tuple(o + p for o, p in zip(box.offsets, part.offsets, strict=True)), part.sizes)
    return box


def _in_order(shard_order: Any) -> bool:
    dims = [entry.args[1] if isinstance(entry, Standin) else entry[1] for entry in shard_order]
    return all(tuple(each) == tuple(sorted(each)) for each in dims)


def _sharded_tensor(value: Standin) -> Sharded:
    # (local_shards, metadata, process group state, sharding spec, init_rrefs)
    state = value.state
    if not isinstance(state, tuple) or len(state) < 3:
        raise ValueError("it has no shards or no metadata")
    shards, metadata, group = state[0], state[1], state[2]
    shape = tuple(map(int, metadata.attribute("size")))
    properties = metadata.attribute("tensor_properties")
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.attribute("dtype")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"its dtype is {dtype}")
    parts = []
    for each in shards:
        # torch pickles a shard's fields; ckptkit writes a call of its class with the same two.
        where, stub = each.args if each.args else (each.attribute("metadata"), each.attribute("tensor"))
        if isinstance(where, TensorStub):
            where, stub = stub, where
        box = Box(tuple(where.attribute("shard_offsets")), tuple(where.attribute("shard_sizes")))
        stored = to_tensor(stub)
        if len(box.sizes) == 1 and stored.spec.numel < box.numel:
            # A flat parameter's last shard may be stored without its padding.
            box = Box(box.offsets, stored.spec.shape)
        if stored.spec.shape != box.sizes:
            raise ValueError(f"a shard of size {box.sizes} is stored as {stored.spec.shape}")
        if box.numel:
            parts.append((box, stored))
    return Sharded(shape, str(dtype).removeprefix("torch."), tuple(parts), *_group(group))


def _group(group: Any) -> tuple[int | None, int | None]:
    """Rank and world size of `ProcessGroupState(local_rank, global_rank, local_world_size, global_world_size)`."""
    if isinstance(group, Standin) and isinstance(group.state, dict):
        return group.attribute("global_rank"), group.attribute("global_world_size")
    if isinstance(group, Standin) and len(group.args) == 4:
        return group.args[1], group.args[3]
    return None, None


def sharded_leaves(tree: Tree) -> list[Sharded]:
    """Every `Sharded` of a tree."""
    if isinstance(tree, Sharded):
        return [tree]
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [leaf for child in children for leaf in sharded_leaves(child)]
