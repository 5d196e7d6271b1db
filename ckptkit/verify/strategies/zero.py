"""DeepSpeed ZeRO 0 to 3: optimizer states, gradients and parameters are cut over the ranks, stage by stage."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from ...errors import MissingPackageError
from ..trace import StepRecord
from ..workload import (
    Workload,
    build_groups,
    build_optimizer,
    build_scheduler,
    fingerprint,
    local_batch,
    loss_of,
    rows_in,
)
from . import FullState, Options, _zero_files, check_form
from ._gather import buffer_pieces, exchange, full_state
from ._loop import data_over_ranks, mean_over_ranks, start_model, torch_device
from ._names import Names, names_of
from ._zero_pieces import engine_pieces


@dataclass(slots=True)
class ZeroRun:
    """A DeepSpeed engine being trained; the engine owns optimizer, scheduler, clipping and accumulation."""

    strategy: str
    workload: Workload
    options: Options
    names: Names
    engine: Any
    scheduler: LambdaLR
    grouped: list[list[str]]  # FQNs of each parameter group
    done: int = 0

    def step(self) -> StepRecord:
        world, rank, micros = dist.get_world_size(), dist.get_rank(), self.options.accumulate
        total, seen, norm = 0.0, 0, None
        rates = tuple(float(group["lr"]) for group in self.engine.optimizer.param_groups)
        for micro in range(micros):
            batch = local_batch(
                self.workload,
                self.done,
                part=micro * world + rank,
                parts=micros * world,
                device=torch_device(self.options),
            )
            seen += fingerprint(batch)
            loss = loss_of(self.engine, batch)
            self.engine.backward(loss)
            total += float(loss.detach())
            if micro == micros - 1 and not self.engine.zero_optimization():
                gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
                norm = float(torch.nn.utils.get_total_norm(gradients))
            self.engine.step()
        if norm is None:
            norm = float(self.engine.get_global_grad_norm())
        record = StepRecord(self.done, mean_over_ranks(total / micros), norm, rates, data=data_over_ranks(seen))
        self.done += 1
        return record

    def full_state(self) -> FullState:
        pieces = engine_pieces(self.engine)
        pieces += buffer_pieces(self.engine.module, self.names)
        tensors = exchange(pieces, self.names.shapes)
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": fqns}
            for group, fqns in zip(self.engine.optimizer.param_groups, self.grouped, strict=True)
        ]
        return full_state(tensors, groups, self.names, self.scheduler, self.done)

    def save(self, path: Path, form: str) -> None:
        check_form(self.strategy, form, tuple(_zero_files.FORMS))
        _zero_files.FORMS[form].save(self, path)
        dist.barrier()

    def load(self, path: Path, form: str) -> None:
        check_form(self.strategy, form, tuple(_zero_files.FORMS))
        _zero_files.FORMS[form].load(self, path)


@dataclass(frozen=True, slots=True)
class Zero:
    """Options' `details`: `config`, merged over the DeepSpeed configuration made here."""

    name: str
    stage: int
    offload: bool = False
    forms: tuple[str, ...] = tuple(_zero_files.FORMS)
    package: str | None = "deepspeed"

    def build(self, workload: Workload, options: Options) -> ZeroRun:
        if importlib.util.find_spec("deepspeed") is None:
            raise MissingPackageError("deepspeed", needed_for=f"the strategy {self.name}", extra="deepspeed")
        import deepspeed

        names = names_of(workload)
        model = start_model(workload, options)
        groups = build_groups(workload, model)
        fqns = {id(p): name for name, p in model.named_parameters()}
        grouped = [[fqns[id(p)] for p in group["params"]] for group in groups]
        optimizer = build_optimizer(options.optimizer, groups)
        scheduler = build_scheduler(optimizer)
        deepspeed.init_distributed(dist_backend="nccl" if options.device == "cuda" else "gloo", verbose=False)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=self._config(workload, options)
        )
        _undo_startup_step(engine.optimizer)
        return ZeroRun(self.name, workload, options, names, engine, scheduler, grouped)

    def _config(self, workload: Workload, options: Options) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": rows_in(workload) // (dist.get_world_size() * options.accumulate),
            "gradient_accumulation_steps": options.accumulate,
            # DeepSpeed clips at 1.0 where nothing is said (0.19.8, runtime/constants.py, GRADIENT_CLIPPING_DEFAULT).
            "gradient_clipping": options.clip or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        if options.precision == "bf16":
            config["bf16"] = {"enabled": True}
        return _merged(config, options.details.get("config", {}))


def _undo_startup_step(optimizer: Any) -> None:
    """Makes the low-precision optimizer of ZeRO 0 start where it was put.

    It takes one step on zero gradients when it is made (0.19.8, runtime/fp16/unfused_optimizer.py,
    `initialize_optimizer_states`): the masters decay once and every step count is one too high ever after. The other
    stages no longer do so.
    """
    if hasattr(optimizer, "fp16_groups") and hasattr(optimizer, "fp32_groups"):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                master.data.copy_(weight.data)
        optimizer.optimizer.state.clear()


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {k: _merged(base[k], v) if isinstance(v, Mapping) and k in base else v for k, v in over.items()}
    return {**base, **both}


STRATEGIES = (
    Zero("zero0", 0),
    Zero("zero1", 1),
    Zero("zero2", 2),
    Zero("zero3", 3),
    Zero("zero2-offload", 2, offload=True),
    Zero("zero3-offload", 3, offload=True),
)
