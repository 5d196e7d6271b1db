"""The training loop that all torch-native strategies share; what differs between them is a `Way`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from ..trace import StepRecord
from ..workload import Workload, build_model, fingerprint, local_batch, loss_of
from . import FullState, Options, check_form
from ._names import Names


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of checkpoint: how the strategy's own API writes and reads it."""

    save: Callable[[TorchRun, Path], None]
    load: Callable[[TorchRun, Path], None]


@dataclass(frozen=True, slots=True)
class Way:
    """How a strategy differs from plain training.

    `sync(model, last)` surrounds the micro-batches; gradients are reduced in the last. `clip(model, limit)` clips and
    answers the global norm before clipping.
    """

    name: str
    sync: Callable[[nn.Module, bool], AbstractContextManager[Any]]
    clip: Callable[[nn.Module, float], float]
    gather: Callable[[TorchRun], FullState]
    forms: Mapping[str, Form]


@dataclass(slots=True)
class TorchRun:
    """A run of a torch-native strategy. `model` is what is called, wrapper included."""

    way: Way
    workload: Workload
    options: Options
    names: Names
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    done: int = 0

    def step(self) -> StepRecord:
        world, rank, micros = dist.get_world_size(), dist.get_rank(), self.options.accumulate
        total, seen = 0.0, 0
        self.optimizer.zero_grad()
        for micro in range(micros):
            part = micro * world + rank
            batch = local_batch(
                self.workload, self.done, part=part, parts=micros * world, device=torch_device(self.options)
            )
            seen += fingerprint(batch)
            with self.way.sync(self.model, micro == micros - 1):
                loss = loss_of(self.model, batch)
                (loss / micros).backward()
            total += float(loss.detach())
        limit = self.options.clip if self.options.clip is not None else float("inf")
        norm = self.way.clip(self.model, limit)
        applied = self.way.clip(self.model, float("inf")) if self.options.clip is not None else norm
        rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        self.optimizer.step()
        self.scheduler.step()
        record = StepRecord(self.done, mean_over_ranks(total / micros), norm, rates, applied, data_over_ranks(seen))
        self.done += 1
        return record

    def full_state(self) -> FullState:
        return self.way.gather(self)

    def save(self, path: Path, form: str) -> None:
        check_form(self.way.name, form, tuple(self.way.forms))
        self.way.forms[form].save(self, path)
        dist.barrier()

    def load(self, path: Path, form: str) -> None:
        check_form(self.way.name, form, tuple(self.way.forms))
        self.way.forms[form].load(self, path)


def mean_over_ranks(value: float) -> float:
    """Collective. The mean in fp64 over the ranks, which have equal parts of the batch."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)  # a CPU tensor: the pool's groups serve it by gloo on every device
    return float(total) / dist.get_world_size()


def data_over_ranks(seen: int) -> str:
    """Collective. The fingerprint of the whole batch from those of the parts; int64 sums wrap, as they should."""
    total = torch.tensor((seen + 2**63) % 2**64 - 2**63)
    dist.all_reduce(total)
    return f"{int(total) % 2**64:016x}"


def torch_device(options: Options) -> str:
    """The device of this rank's tensors."""
    return f"cuda:{torch.cuda.current_device()}" if options.device == "cuda" else options.device


def start_model(workload: Workload, options: Options) -> nn.Module:
    """The plain model of the seed, on its device; for bf16 its weights are rounded, as DeepSpeed's masters start."""
    model = build_model(workload, options.seed).to(torch_device(options))
    if options.precision == "bf16":
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
    return model


def compute_in_bf16(model: nn.Module) -> nn.Module:
    """Makes `model` compute with bf16 copies of its fp32 weights, as FSDP's mixed precision does. In place."""
    plain = model.forward
    inside = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return plain(*args, **kwargs)
        inside = True
        try:
            low = {name: p.bfloat16() for name, p in model.named_parameters()}
            return functional_call(model, low, args, kwargs, tie_weights=True)
        finally:
            inside = False

    model.forward = forward
    return model


def plain_clip(model: nn.Module, limit: float) -> float:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(getattr(norm, "full_tensor", lambda: norm)())
