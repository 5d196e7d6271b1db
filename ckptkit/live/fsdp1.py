"""fsdp1: a module in `FullyShardedDataParallel`: each unit's parameters are runs of one flat vector.

Source: `_shard_param_infos`, `_numels`, `_params` of torch/distributed/fsdp/_flat_param.py (2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..core.fqn import clean, join
from .holder import Holder, Live, Share, named_groups, run_share, whole_share
from .names import module_names
from .plain import buffer_holders


def matches(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def adapt(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Live:
    by_id: dict[int, list[str]] = {}
    holders: list[Holder] = []
    aliases: dict[str, str] = {}
    frozen: set[str] = set()
    wrapped: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            base = clean(f"{prefix}.").rstrip(".")
            holders += _unit(base, module._handle, by_id, aliases, frozen)
            wrapped |= {id(module._handle.flat_param), *map(id, module._handle.flat_param._params or ())}
    names = module_names(model)
    for fqn, parameter in names.parameters.items():
        # What FSDP1 was told to ignore is an ordinary parameter.
        if id(parameter) not in wrapped and not fqn.endswith("_flat_param"):
            holders.append(Holder(parameter.detach(), (whole_share(fqn, tuple(parameter.shape)),), parameter))
            by_id[id(parameter)] = [fqn]
            frozen |= set() if parameter.requires_grad else {fqn}
    return Live(
        "fsdp1",
        [*holders, *buffer_holders(names.buffers)],
        [holder for holder in holders if holder.key.requires_grad],
        optimizer=optimizer,
        groups=named_groups(optimizer, by_id),
        aliases={**{a: o for a, o in names.aliases.items() if not a.endswith("_flat_param")}, **aliases},
        buffers=frozenset(names.buffers),
        frozen=frozenset(frozen),
    )


def _unit(
    base: str, handle: Any, by_id: dict[int, list[str]], aliases: dict[str, str], frozen: set[str]
) -> Iterator[Holder]:
    flat = handle.flat_param
    names = [join(base, name) for name in flat._fqns]
    shapes = [tuple(shape) for shape in flat._shapes]
    shares = list(_shares(handle, names, shapes))
    for shared in flat._shared_param_infos:
        owner = join(base, clean(f"{shared.prim_module_name}.{shared.prim_param_name}".lstrip(".")))
        aliases[join(base, clean(f"{shared.module_name}.{shared.param_name}".lstrip(".")))] = owner
    if not handle._use_orig_params:
        by_id[id(flat)] = names
        frozen |= set() if flat.requires_grad else set(names)
        yield Holder(flat.detach(), tuple(shares), flat)
        return
    for index, (name, parameter) in enumerate(zip(names, flat._params, strict=True)):
        by_id[id(parameter)] = [name]
        frozen |= set() if parameter.requires_grad else {name}
        part = [share for share in shares if share.fqn == name]
        # The original parameter is now a view of its run alone: the share starts at 0 of it.
        moved = tuple(Share(share.fqn, share.shape, share.boxes, 0) for share in part)
        yield Holder(parameter.detach(), moved or (Share(name, shapes[index], ()),), parameter)


def _shares(handle: Any, names: list[str], shapes: list[tuple[int, ...]]) -> Iterator[Share]:
    flat = handle.flat_param
    if not handle.uses_sharded_strategy:
        yield from _unsharded(flat, names, shapes)
        return
    for name, shape, info in zip(names, shapes, flat._shard_param_infos, strict=True):
        if info.in_shard:
            begin = info.intra_param_start_idx
            yield run_share(name, shape, begin, begin + info.numel_in_shard, info.offset_in_shard)
        else:
            yield Share(name, shape, ())  # of the model, though this rank holds none of it


def _unsharded(flat: Any, names: list[str], shapes: list[tuple[int, ...]]) -> Iterator[Share]:
    """NO_SHARD, or one rank: every parameter whole, with the padding between them where there is some."""
    at, which = 0, iter(zip(names, shapes, strict=True))
    padded = flat._numels_with_padding
    is_padding = flat._is_padding_mask
    for numel, padding in zip(padded, is_padding, strict=True):
        if not padding:
            name, shape = next(which)
            yield run_share(name, shape, 0, numel, at)
        at += numel
