"""FSDP2 (`fully_shard`): parameters are DTensors cut along dimension 0, in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..workload import Workload, build_groups, build_optimizer, build_scheduler, units
from . import FullState, Options, _dcp, _fsdp2_files
from ._gather import Piece, buffer_pieces, exchange, full_state, group_table, state_pieces
from ._loop import TorchRun, Way, plain_clip, start_model
from ._mesh import mesh_of
from ._names import names_of


@contextmanager
def _sync(model: nn.Module, last: bool) -> Iterator[None]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    yield


def _gather(run: TorchRun) -> FullState:
    """`full_tensor` is a plain all-gather of the shards along dimension 0, padding cut off."""
    fqns = {id(p): name for name, p in run.model.named_parameters()}
    pieces = [Piece(name, "value", None, _whole(p)) for name, p in run.model.named_parameters()]
    for p, state in run.optimizer.state.items():
        pieces += state_pieces(fqns[id(p)], {slot: _whole(value) for slot, value in state.items()})
    tensors = exchange([*pieces, *buffer_pieces(run.model, run.names)], run.names.shapes)
    return full_state(tensors, group_table(run.optimizer, lambda p: [fqns[id(p)]]), run.names, run.scheduler, run.done)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


FORMS = {**_dcp.FORMS, **_fsdp2_files.FORMS}


@dataclass(frozen=True, slots=True)
class Fsdp2:
    """`reshard` frees parameters after the forward pass; `hybrid` shards within and replicates between halves."""

    name: str
    reshard: bool = True
    hybrid: bool = False
    forms: tuple[str, ...] = tuple(FORMS)
    package: str | None = None

    def build(self, workload: Workload, options: Options) -> TorchRun:
        model = start_model(workload, options)
        policy = MixedPrecisionPolicy()
        if options.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = mesh_of(options.device, hybrid=self.hybrid)
        for unit in units(model):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=None if self.reshard else False)
        optimizer = build_optimizer(options.optimizer, build_groups(workload, model))
        way = Way(self.name, _sync, plain_clip, _gather, FORMS)
        return TorchRun(way, workload, options, names_of(workload), model, optimizer, build_scheduler(optimizer))


STRATEGIES = (Fsdp2("fsdp2"), Fsdp2("fsdp2-no-reshard", reshard=False), Fsdp2("fsdp2-hybrid", hybrid=True))
