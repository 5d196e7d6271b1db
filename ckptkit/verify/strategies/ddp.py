"""DistributedDataParallel: everything on every rank, gradients averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..workload import Workload, build_groups, build_optimizer, build_scheduler
from . import Options
from ._loop import TorchRun, compute_in_bf16, start_model
from ._names import names_of
from .single import WAY as PLAIN


def _sync(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    assert isinstance(model, DistributedDataParallel)
    return nullcontext() if last else model.no_sync()


WAY = replace(PLAIN, name="ddp", sync=_sync)


@dataclass(frozen=True, slots=True)
class Ddp:
    name: str = "ddp"
    forms: tuple[str, ...] = tuple(WAY.forms)
    package: str | None = None

    def build(self, workload: Workload, options: Options) -> TorchRun:
        model = start_model(workload, options)
        if options.precision == "bf16":
            compute_in_bf16(model)
        devices = [torch.cuda.current_device()] if options.device == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices)
        optimizer = build_optimizer(options.optimizer, build_groups(workload, model))
        return TorchRun(WAY, workload, options, names_of(workload), wrapped, optimizer, build_scheduler(optimizer))


STRATEGIES = (Ddp(),)
