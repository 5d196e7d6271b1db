"""Whole weights and optimizer states of a live model that somebody else built, under their clean names."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..core.fqn import clean, common_prefix
from .strategies._gather import Piece, exchange
from .summary import summarize
from .trace import TensorSummary


def root_of(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """The outermost module that owns most of the optimizer's parameters; of an optimizer that holds none of any
    module's (it was made before sharding), the largest module that trains. None where there is no module."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and "_modules" in m.__dict__]
    inner = {id(child) for m in modules for child in m._modules.values()}
    roots = [m for m in modules if id(m) not in inner and any(p.requires_grad for p in m.parameters())]
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return max(
        roots, key=lambda m: (sum(id(p) in mine for p in m.parameters()), sum(1 for _ in m.parameters())), default=None
    )


def numel(root: nn.Module) -> int:
    """Elements of this rank's parameters."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in root.parameters())


def summaries(root: nn.Module) -> dict[str, TensorSummary]:
    """Collective. Summaries of the whole parameters, each once."""
    found = {}
    for name, parameter in _own(root):
        with _gathered(parameter):
            found[name] = summarize(_master(parameter))
    found.update({name: summarize(tensor) for name, tensor in _fsdp1_weights(root).items()})
    prefix = common_prefix(found)
    return {name.removeprefix(prefix): summary for name, summary in sorted(found.items())}


def states(root: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorSummary]:
    """Collective. Optimizer states that are whole or DTensors, as `fqn:slot`; those of flat parameters are left out."""
    found = {}
    sharded = _fsdp1_parameters(root)
    for name, parameter in _stripped(_own(root)):
        if id(parameter) in sharded:
            continue
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}:{slot}"] = summarize(value)
    return found


def groups(root: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The plain options of each named parameter's group; the learning rate is recorded step by step instead.

    An optimizer of flat vectors (DeepSpeed's, FSDP1's) has no names; if all its groups agree, they are everybody's.
    """
    names = {id(p): name for name, p in _stripped(list(root.named_parameters()))}
    found: dict[str, dict[str, Any]] = {}
    every = []
    for group in optimizer.param_groups:
        options: dict[str, Any] = {
            k: group[k] for k in ("weight_decay", "momentum", "betas", "eps", "nesterov") if k in group
        }
        every.append(options)
        found.update(dict.fromkeys((names[id(p)] for p in group["params"] if id(p) in names), options))
    if not found and all(options == every[0] for options in every):
        found = dict.fromkeys(names.values(), every[0])
    return found


def _own(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that FSDP1 does not manage."""
    sharded = _fsdp1_parameters(root)
    return [(clean(name), p) for name, p in root.named_parameters() if id(p) not in sharded]


def _stripped(named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    names = [clean(name) for name, _ in named]
    prefix = common_prefix(names)
    return [(name.removeprefix(prefix), p) for name, (_, p) in zip(names, named, strict=True)]


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return gathered


def _master(parameter: nn.Parameter) -> torch.Tensor:
    """Collective. The fp32 master that DeepSpeed keeps of a 16-bit parameter, in the parameter's shape; else itself."""
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    if not (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
        return parameter
    from deepspeed.utils import safe_get_full_fp32_param

    master: torch.Tensor | None = safe_get_full_fp32_param(parameter)
    return parameter if master is None else master.view(parameter.shape)


def _fsdp1_parameters(root: nn.Module) -> set[int]:
    found: set[int] = set()
    for _, module in _units(root):
        flat = module._handle.flat_param
        found |= {id(flat), *(id(p) for p in flat._params or ())}
    return found


def _units(root: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield clean(f"{name}." if name else ""), module


def _fsdp1_weights(root: nn.Module) -> dict[str, torch.Tensor]:
    """Collective. From this rank's run of each flat vector, by FSDP1's own table of what a shard holds; nothing is
    unsharded, so a step that is under way is not disturbed (torch 2.13, fsdp/_flat_param.py `_shard_param_infos`)."""
    units = list(_units(root))
    if not units:
        return {}
    pieces, shapes = [], {}
    for prefix, module in units:
        handle = module._handle
        flat = handle.flat_param
        shapes.update({prefix + name: tuple(shape) for name, shape in zip(flat._fqns, flat._shapes, strict=True)})
        pieces += list(_pieces(prefix, flat, whole=not handle.uses_sharded_strategy))
    return {name: tensor for (name, _), tensor in exchange(pieces, shapes).items()}


def _pieces(prefix: str, flat: Any, *, whole: bool) -> Iterator[Piece]:
    local = flat.detach() if whole else flat._local_shard.detach()
    if whole:
        index = 0
        for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not padding:
                yield Piece(prefix + flat._fqns[index], "value", 0, local[:numel].flatten())
                index += 1
            local = local[numel:]
        return
    for name, info in zip(flat._fqns, flat._shard_param_infos, strict=True):
        if info.in_shard:
            run = local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
            yield Piece(prefix + name, "value", info.intra_param_start_idx, run)
