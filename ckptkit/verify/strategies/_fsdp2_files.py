"""FSDP2 checkpoints other than DCP directories: verl's rank files, one full file, DCP's safetensors storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from ._extras import extras_of, restore_extras
from ._loop import Form, TorchRun


def _rank_file(path: Path, kind: str) -> Path:
    return path / f"{kind}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


def _save_ranks(run: TorchRun, path: Path) -> None:
    """As verl's FSDPCheckpointManager does: sharded state dicts of DTensors, one file a rank and kind."""
    path.mkdir(parents=True, exist_ok=True)
    extras = extras_of(run)
    torch.save(run.model.state_dict(), _rank_file(path, "model"))
    torch.save(run.optimizer.state_dict(), _rank_file(path, "optim"))
    extra = {"lr_scheduler": extras["scheduler"], "rng": extras["rng"], "step": extras["step"]}
    torch.save(extra, _rank_file(path, "extra_state"))
    if dist.get_rank() == 0:
        config = {"FSDP_version": 2, "world_size": dist.get_world_size()}
        (path / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def _load_ranks(run: TorchRun, path: Path) -> None:
    model, optimizer, extra = (
        torch.load(_rank_file(path, kind), map_location="cpu", weights_only=False)
        for kind in ("model", "optim", "extra_state")
    )
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    restore_extras(run, {"scheduler": extra["lr_scheduler"], "step": extra["step"]})


def _save_full(run: TorchRun, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model, "optimizer": optimizer, **extras_of(run)}, path)


def _load_full(run: TorchRun, path: Path) -> None:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    restore_extras(run, content)


def _save_hf(run: TorchRun, path: Path, *, consolidate: bool) -> None:
    """Weights alone: the storage holds tensors, and no optimizer by its nature."""
    kept = _what_hf_holds(run)
    index = dict.fromkeys(kept, 1)
    writer = HuggingFaceStorageWriter(
        str(path), fqn_to_index_mapping=index, save_distributed=True, enable_consolidation=consolidate
    )
    dcp.save(kept, storage_writer=writer)


def _load_hf(run: TorchRun, path: Path) -> None:
    kept = _what_hf_holds(run)
    dcp.load(kept, storage_reader=HuggingFaceStorageReader(str(path)))
    set_model_state_dict(run.model, kept, options=StateDictOptions(strict=False))


def _what_hf_holds(run: TorchRun) -> dict[str, Any]:
    """The weights without buffers that are 0-d, integer or bool, and without aliases.

    DCP's consolidation writes 0-d tensors as zero and fails on the other kinds and on tied weights (torch 2.13).
    """
    state: dict[str, Any] = get_model_state_dict(run.model)
    return {k: v for k, v in state.items() if k not in run.names.aliases and v.dim() and v.is_floating_point()}


FORMS = {
    "ranks": Form(_save_ranks, _load_ranks),
    "full": Form(_save_full, _load_full),
    "hf": Form(lambda run, path: _save_hf(run, path, consolidate=False), _load_hf),
    "hf-consolidated": Form(lambda run, path: _save_hf(run, path, consolidate=True), _load_hf),
}
