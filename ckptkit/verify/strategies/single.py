"""One process and no wrapper: the reference that every other strategy is held against."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..workload import Workload, build_groups, build_optimizer, build_scheduler
from . import FullState, Options, _dcp, _torch_file
from ._gather import Piece, buffer_pieces, exchange, full_state, group_table, state_pieces
from ._loop import TorchRun, Way, compute_in_bf16, plain_clip, start_model
from ._names import names_of


def replicated_state(run: TorchRun) -> FullState:
    """The whole state of a run whose every rank has everything (single process, DDP)."""
    model = _torch_file.inner(run.model)
    fqns = {id(p): name for name, p in model.named_parameters()}
    pieces = [Piece(name, "value", None, p) for name, p in model.named_parameters()]
    for p, state in run.optimizer.state.items():
        pieces += state_pieces(fqns[id(p)], state)
    tensors = exchange([*pieces, *buffer_pieces(model, run.names)], run.names.shapes)
    groups = group_table(run.optimizer, lambda p: [fqns[id(p)]])
    return full_state(tensors, groups, run.names, run.scheduler, run.done)


def _no_sync(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    return nullcontext()


WAY = Way("single", _no_sync, plain_clip, replicated_state, {**_torch_file.FORMS, **_dcp.FORMS})


@dataclass(frozen=True, slots=True)
class Single:
    name: str = "single"
    forms: tuple[str, ...] = tuple(WAY.forms)
    package: str | None = None

    def build(self, workload: Workload, options: Options) -> TorchRun:
        model = start_model(workload, options)
        if options.precision == "bf16":
            compute_in_bf16(model)
        optimizer = build_optimizer(options.optimizer, build_groups(workload, model))
        return TorchRun(WAY, workload, options, names_of(workload), model, optimizer, build_scheduler(optimizer))


STRATEGIES = (Single(),)
