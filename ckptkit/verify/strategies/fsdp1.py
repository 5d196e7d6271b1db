"""FSDP1 (`FullyShardedDataParallel`): each unit's parameters are one flat vector, cut into equal runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from ..workload import Workload, build_groups, build_optimizer, build_scheduler, units
from . import FullState, Options, _dcp, _fsdp1_files
from ._gather import Piece, buffer_pieces, exchange, full_state, group_table, state_pieces
from ._loop import TorchRun, Way, start_model, torch_device
from ._mesh import mesh_of
from ._names import clean, names_of


def _sync(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    assert isinstance(model, FSDP)
    return nullcontext() if last else model.no_sync()


def _clip(model: nn.Module, limit: float) -> float:
    assert isinstance(model, FSDP)
    return float(model.clip_grad_norm_(limit))


def _gather(run: TorchRun) -> FullState:
    """From this rank's run of every flat vector, cut by FSDP's own table of shard positions.

    `_shard_param_infos` says which elements of which parameter a rank holds, for use_orig_params True and False alike
    (torch 2.13, fsdp/_flat_param.py, `_get_shard_metadata`). FSDP's own full optimizer state is wrong on CPU with its
    default of offload_to_cpu=True, so it is no truth.
    """
    fqns: dict[int, list[str]] = {}
    pieces: list[Piece] = []
    for prefix, module in run.model.named_modules():
        if isinstance(module, FSDP) and module._handle is not None:
            pieces += _unit_pieces(run, clean(prefix + "." if prefix else ""), module._handle, fqns)
    tensors = exchange([*pieces, *buffer_pieces(run.model, run.names)], run.names.shapes)
    groups = group_table(run.optimizer, lambda p: fqns[id(p)])
    return full_state(tensors, groups, run.names, run.scheduler, run.done)


def _unit_pieces(run: TorchRun, prefix: str, handle: Any, fqns: dict[int, list[str]]) -> Iterator[Piece]:
    flat = handle.flat_param
    names = [prefix + name for name in flat._fqns]
    whole = not handle.uses_sharded_strategy
    state = run.optimizer.state
    if handle._use_orig_params:
        for name, p in zip(names, flat._params, strict=True):
            fqns[id(p)] = [name]
    else:
        fqns[id(flat)] = [name for name in names if name not in run.names.aliases]
    offset = 0
    for index, (name, numel) in enumerate(zip(names, flat._numels, strict=True)):
        if whole:
            at, start = slice(offset, offset + numel), 0
            offset += numel
        else:
            info = flat._shard_param_infos[index]
            if not info.in_shard:
                continue
            at, start = (
                slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard),
                info.intra_param_start_idx,
            )
        if handle._use_orig_params:
            p = flat._params[index]
            yield Piece(name, "value", start, p.detach().flatten())
            entries = {slot: v.flatten() if v.dim() else v for slot, v in state.get(p, {}).items()}
        else:
            yield Piece(name, "value", start, flat.detach()[at])
            entries = {slot: v[at] if v.dim() else v for slot, v in state.get(flat, {}).items()}
        yield from (Piece(name, slot, start, v) for slot, v in entries.items() if v.dim())
        yield from state_pieces(name, {slot: v for slot, v in entries.items() if not v.dim()})


FORMS = {**_fsdp1_files.FORMS, **{f"get-state-dict-{name}": form for name, form in _dcp.FORMS.items()}}


@dataclass(frozen=True, slots=True)
class Fsdp1:
    """Options' `details`: `use_orig_params` (True), `device_mesh` (False: sharded states as ShardedTensor)."""

    name: str
    sharding: ShardingStrategy
    forms: tuple[str, ...] = tuple(FORMS)
    package: str | None = None

    def build(self, workload: Workload, options: Options) -> TorchRun:
        model = start_model(workload, options)
        where: dict[str, Any] = {}
        if self.sharding is ShardingStrategy.HYBRID_SHARD:
            where["device_mesh"] = mesh_of(options.device, hybrid=True)
        elif options.details.get("device_mesh", False):
            where["device_mesh"] = mesh_of(options.device, hybrid=False)
        policy = None
        if options.precision == "bf16":
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        chosen = {id(unit) for unit in units(model)}
        # With use_orig_params the parameters stay the same objects, but become 1-D pieces: groups that ask for shapes
        # are only right when made before. Without it, flat parameters are all there is, and they come afterwards.
        orig = options.details.get("use_orig_params", True)
        groups = build_groups(workload, model) if orig else []
        wrapped = FSDP(
            model,
            sharding_strategy=self.sharding,
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or id(module) in chosen,
            mixed_precision=policy,
            device_id=torch.device(torch_device(options)),
            use_orig_params=orig,
            **where,
        )
        optimizer = build_optimizer(options.optimizer, groups if orig else build_groups(workload, wrapped))
        way = Way(self.name, _sync, _clip, _gather, FORMS)
        return TorchRun(way, workload, options, names_of(workload), wrapped, optimizer, build_scheduler(optimizer))


STRATEGIES = (
    Fsdp1("fsdp1", ShardingStrategy.FULL_SHARD),
    Fsdp1("fsdp1-grad-op", ShardingStrategy.SHARD_GRAD_OP),
    Fsdp1("fsdp1-no-shard", ShardingStrategy.NO_SHARD),
    Fsdp1("fsdp1-hybrid", ShardingStrategy.HYBRID_SHARD),
)
