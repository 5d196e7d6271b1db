"""Laying out one file a rank: FSDP2's DTensors under verl's names, or FSDP1's ShardedTensors.

The files are laid out like those of `torch.save`. What describes the shards (device mesh, placements, shard metadata)
is pickled from torch's own objects, so that it has the form that the installed torch reads; only the tensors in it are
written as names and storages. Sources: torch/distributed/tensor/_api.py, fsdp/_shard_utils.py (2.13), and verl's
utils/checkpoint/fsdp_checkpoint_manager.py (0.9.1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..core.box import Box, shard, whole
from ..core.checkpoint import Contents, Drop
from ..core.disassemble import numbered
from ..core.layout import Body, Layout, OutFile, Raw, Segment
from ..core.options import WriteOptions
from ..core.spec import Tensor, TensorKey
from ..core.tree import Path, Tree, dotted, is_by_rank, rank_key, walk
from ..io.torch_layout import torch_file
from ._rank_objects import Part, dtensor, mesh_of, sharded_tensor

FSDP1 = "fsdp1-ranks"
_Wrap = Callable[[Part], Any]  # a rank's part of a tensor as the object that stands in its file


def layout(contents: Contents, options: WriteOptions) -> Layout:
    """The files of all ranks. The optimizer has integer ids in verl's files, as `optimizer.load_state_dict` wants them,
    and names in FSDP1's, as `FSDP.optim_state_dict_to_load` does."""
    ranks = options.ranks
    files: list[OutFile] = []
    for rank in range(ranks):
        cut = _Cut(rank, ranks, contents.facts.get("buffers") or frozenset())
        if options.target == FSDP1:
            device = options.mesh.partition(":")[0]
            tree = cut.tree(contents.tree, partial(sharded_tensor, rank=rank, ranks=ranks, device=device))
            files.append(rank_file(f"checkpoint_rank_{rank}.pt", tree))
            continue
        mesh = mesh_of(options.mesh, rank, ranks)
        tree = cut.tree(contents.tree, partial(dtensor, mesh=mesh))
        for kind, part in _verl(tree).items():
            files.append(rank_file(f"{kind}_world_size_{ranks}_rank_{rank}.pt", part))
    if options.target != FSDP1:
        config = json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=4)
        files.append(OutFile("fsdp_config.json", (Raw(config.encode()),)))
    return Layout(tuple(files))


def _verl(tree: Mapping[str, Tree]) -> dict[str, Tree]:
    """A rank's tree as verl's three files."""
    out: dict[str, Tree] = {"model": tree["model"]}
    if "optimizer" in tree:
        optimizer = tree["optimizer"]
        named = any(isinstance(name, str) for group in optimizer["param_groups"] for name in group["params"])
        out["optim"] = numbered(optimizer) if named else optimizer
    extras = {name: value for name, value in tree.items() if name not in ("model", "optimizer")}
    if "scheduler" in extras and "lr_scheduler" not in extras:
        extras["lr_scheduler"] = extras.pop("scheduler")
    return {**out, "extra_state": extras}


@dataclass(slots=True)
class _Cut:
    """Cuts a checkpoint's tree to one rank's. Tied names share their part, and so their storage in the file."""

    rank: int
    ranks: int
    buffers: frozenset[str]
    _parts: dict[int, Part] = field(default_factory=dict)

    def tree(self, tree: Mapping[str, Tree], wrap: _Wrap) -> dict[str, Tree]:
        out = {name: own(value, self.rank) for name, value in tree.items() if name not in ("model", "optimizer")}
        model: Mapping[str, Any] = tree["model"]
        out["model"] = {name: self._of_model(name, value, wrap) for name, value in model.items()}
        if "optimizer" in tree:
            out["optimizer"] = self._optimizer(tree["optimizer"], model, wrap)
        return out

    def _of_model(self, name: str, value: Any, wrap: _Wrap) -> Any:
        is_whole = not isinstance(value, Tensor) or name in self.buffers or not value.spec.shape
        return value if is_whole else wrap(self._part(name, value))

    def _optimizer(self, tree: Mapping[str, Any], model: Mapping[str, Any], wrap: _Wrap) -> dict[str, Any]:
        """States of their parameter's shape are split as it is; all others every rank has whole."""
        ids = [key for group in tree["param_groups"] for key in group["params"]]
        shapes = {value.spec.shape for value in model.values() if isinstance(value, Tensor) and value.spec.shape}
        state = {}
        for key, slots in tree["state"].items():
            own = model.get(key)
            fits = {own.spec.shape} if isinstance(own, Tensor) else shapes if key in ids else set()
            state[key] = {
                slot: wrap(self._part(f"{key}[{slot}]", value))
                if isinstance(value, Tensor) and value.spec.shape and value.spec.shape in fits
                else value
                for slot, value in slots.items()
            }
        return {**tree, "state": state}

    def _part(self, name: str, tensor: Tensor) -> Part:
        if id(tensor) not in self._parts:
            shape = tensor.spec.shape
            box = shard(shape, 0, self.ranks, self.rank) or Box((shape[0], *(0,) * (len(shape) - 1)), (0, *shape[1:]))
            self._parts[id(tensor)] = Part(name, tensor, box)
        return self._parts[id(tensor)]


def own(tree: Tree, rank: int) -> Tree:
    """A rank's own, where a tree has one value for each rank of the source; those go round if they are fewer."""
    if not isinstance(tree, Mapping):
        return tree
    if is_by_rank(tree):
        return tree[rank_key(rank % len(tree))]
    return {key: own(value, rank) for key, value in tree.items()}


def surplus(contents: Contents, options: WriteOptions) -> Iterator[Drop]:
    """What ranks of the source have for themselves that the target's, which are fewer, have no room for."""
    extras = {name: value for name, value in contents.tree.items() if name not in ("model", "optimizer")}
    for path, count in _by_rank(extras, ()):
        if options.ranks == 1 < count:
            yield Drop(dotted(path), "each rank of the source has its own; the target's one gets that of rank 0")
        for rank in range(options.ranks, count if options.ranks > 1 else 0):
            yield Drop(dotted((*path, rank_key(rank))), f"each rank has its own, and the target has {options.ranks}")


def _by_rank(tree: Tree, path: Path) -> Iterator[tuple[Path, int]]:
    """The paths under which each rank has a value, and for how many."""
    if is_by_rank(tree):
        yield path, len(tree)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _by_rank(value, (*path, key))


def rank_file(name: str, tree: Tree) -> OutFile:
    """One file. Storages are whole tensors, or know their own segments."""
    names = {id(value): dotted(path) for path, value in walk(tree) if isinstance(value, Tensor)}

    def content(storage: Any, record: int) -> Sequence[Segment]:
        if not isinstance(storage, Tensor):
            return list(storage.segments(record))
        key = TensorKey(names.get(id(storage), "device mesh"))
        return [Body(key, storage, whole(storage.spec.shape), storage.spec.dtype, record)]

    return OutFile(name, tuple(torch_file(tree, content)))
