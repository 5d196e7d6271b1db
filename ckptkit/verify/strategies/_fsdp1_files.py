"""FSDP1's own kinds of checkpoint: full files, sharded through DCP or one file a rank, local flat parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ._extras import extras_of, restore_extras
from ._loop import Form, TorchRun


@contextmanager
def _kind(run: TorchRun, kind: StateDictType) -> Iterator[None]:
    """FULL without offloading to CPU: on a CPU "offload_to_cpu" crashes for weights, and for optimizer states, where it
    is the default, gathers every moment into one buffer, so that all equal the last (torch 2.13)."""
    if kind is StateDictType.FULL_STATE_DICT:
        offload = run.options.device != "cpu"
        configs: tuple[Any, Any] = (
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=False),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=False),
        )
    else:
        configs = (ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    with FSDP.state_dict_type(run.model, kind, *configs):
        yield


def _save_full(run: TorchRun, path: Path, *, rekey: bool = False) -> None:
    with _kind(run, StateDictType.FULL_STATE_DICT):
        model, optimizer = run.model.state_dict(), FSDP.optim_state_dict(run.model, run.optimizer)
    if rekey:
        optimizer = FSDP.rekey_optim_state_dict(optimizer, OptimStateKeyType.PARAM_ID, run.model)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model, "optimizer": optimizer, **extras_of(run)}, path)


def _load_full(run: TorchRun, path: Path, *, rekey: bool = False) -> None:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    optimizer = content["optimizer"]
    if rekey:
        optimizer = FSDP.rekey_optim_state_dict(optimizer, OptimStateKeyType.PARAM_NAME, run.model)
    with _kind(run, StateDictType.FULL_STATE_DICT):
        run.model.load_state_dict(content["model"])
        run.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(run.model, run.optimizer, optimizer))
    restore_extras(run, content)


def _sharded(run: TorchRun) -> dict[str, Any]:
    with _kind(run, StateDictType.SHARDED_STATE_DICT):
        return {"model": run.model.state_dict(), "optimizer": FSDP.optim_state_dict(run.model, run.optimizer)}


def _restore_sharded(run: TorchRun, content: dict[str, Any]) -> None:
    with _kind(run, StateDictType.SHARDED_STATE_DICT):
        run.model.load_state_dict(content["model"])
        state = FSDP.optim_state_dict_to_load(run.model, run.optimizer, content["optimizer"])
    run.optimizer.load_state_dict(state)


def _save_dcp(run: TorchRun, path: Path) -> None:
    """Sharded state dicts in one DCP directory: ShardedTensors, or DTensors where FSDP has a device mesh."""
    extras = extras_of(run)
    content = {**_sharded(run), "scheduler": extras["scheduler"], "step": extras["step"]}
    dcp.save(content, checkpoint_id=str(path))


def _load_dcp(run: TorchRun, path: Path) -> None:
    """A fresh run has no optimizer state to fill: one step on zero gradients makes it, as in `get_state_dict`."""
    extras = extras_of(run)
    fill_optimizer(run)
    content = {**_sharded(run), "scheduler": extras["scheduler"], "step": extras["step"]}
    dcp.load(content, checkpoint_id=str(path))
    _restore_sharded(run, content)
    restore_extras(run, content)


def fill_optimizer(run: TorchRun) -> None:
    """Gives a fresh optimizer its state tensors, weights unchanged, so that there is something to load into."""
    rates = [group["lr"] for group in run.optimizer.param_groups]
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    run.optimizer.step()
    run.optimizer.zero_grad()
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _rank_file(path: Path) -> Path:
    return path / f"checkpoint_rank_{dist.get_rank()}.pt"


def _save_ranks(run: TorchRun, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    torch.save({**_sharded(run), **extras_of(run)}, _rank_file(path))


def _load_ranks(run: TorchRun, path: Path) -> None:
    content = torch.load(_rank_file(path), map_location="cpu", weights_only=False)
    _restore_sharded(run, content)
    restore_extras(run, content)


@contextmanager
def _local(run: TorchRun) -> Iterator[None]:
    with FSDP.state_dict_type(run.model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        yield


def _save_local(run: TorchRun, path: Path) -> None:
    """This rank's flat parameters as they are, and the optimizer's own state dict over them."""
    path.mkdir(parents=True, exist_ok=True)
    with _local(run):
        content = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), **extras_of(run)}
    torch.save(content, _rank_file(path))


def _load_local(run: TorchRun, path: Path) -> None:
    content = torch.load(_rank_file(path), map_location="cpu", weights_only=False)
    with _local(run):
        # With use_orig_params FSDP1 finds its own "_flat_param" entries unexpected; the 1-D pieces beside them are the
        # same numbers and do load (torch 2.13).
        run.model.load_state_dict(content["model"], strict=not run.options.details.get("use_orig_params", True))
    run.optimizer.load_state_dict(content["optimizer"])
    restore_extras(run, content)


FORMS = {
    "full": Form(_save_full, _load_full),
    "full-rekeyed": Form(
        lambda run, path: _save_full(run, path, rekey=True), lambda run, path: _load_full(run, path, rekey=True)
    ),
    "sharded-dcp": Form(_save_dcp, _load_dcp),
    "ranks": Form(_save_ranks, _load_ranks),
    "local": Form(_save_local, _load_local),
}
