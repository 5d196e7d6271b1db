"""What the ranks run: each converted checkpoint is loaded by the target strategy's own loader into other weights."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckptkit
from ckptkit.core.spec import TensorKey
from ckptkit.verify.strategies import Options, get_strategy
from ckptkit.verify.workload import Workload

OTHER_SEED = 77  # not the seed of the fixtures: what is not loaded is seen


def resume_all(cells: list[dict[str, Any]], strategy: str, form: str, steps: int) -> list[list[float] | str]:
    """Collective. For each cell (`path`, `options`, `workload`) a fresh run, its own loader, the losses after.

    A cell that fails answers its traceback, the same on every rank, and the others go on.
    """
    return [_one(cell, strategy, form, steps) for cell in cells]


def _one(cell: dict[str, Any], strategy: str, form: str, steps: int) -> list[float] | str:
    problem = ""
    run: Any = None
    try:
        run = get_strategy(strategy).build(Workload(**cell["workload"]), Options(seed=OTHER_SEED, **cell["options"]))
        load_dcp(run, Path(cell["path"])) if form == "dcp" else run.load(Path(cell["path"]), form)
        if form == "universal":
            restore_what_deepspeed_leaves(run, cell["path"])
    except BaseException as error:  # DCP's CheckpointException is no Exception
        problem = "".join(traceback.format_exception(error))[-1500:]
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        return next(each for each in problems if each)
    return [run.step().loss for _ in range(steps)]


def restore_what_deepspeed_leaves(run: Any, path: str) -> None:
    """Buffers and frozen parameters, which `load_universal` leaves at their initial values (0.19.8)."""
    checkpoint = ckptkit.open(path)
    with torch.no_grad():
        named = [*run.engine.module.named_buffers(), *run.engine.module.named_parameters()]
        for name, tensor in named:
            if not tensor.requires_grad and TensorKey(name) in checkpoint.entries:
                tensor.copy_(checkpoint.read(name))


def load_dcp(run: Any, path: Path) -> None:
    """torch.distributed.checkpoint as in PyTorch's tutorials: state dicts of a fresh run, filled in place, set back."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    content: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "scheduler": run.scheduler.state_dict(), "step": 0,
    }  # fmt: skip
    dcp.load(content, checkpoint_id=str(path))
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=content["optimizer"])
    run.scheduler.load_state_dict(content["scheduler"])
    run.done = int(content["step"])
