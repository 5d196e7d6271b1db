"""One torch file for the whole run, written by rank 0 and read by all: what DDP and single-process scripts do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._extras import extras_of, restore_extras
from ._loop import Form, TorchRun


def inner(model: nn.Module) -> nn.Module:
    """The module inside DDP's wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def save_file(run: TorchRun, path: Path, *, prefix: bool, zipped: bool = True) -> None:
    """`prefix` keeps DDP's "module." in the keys. Optimizer ids are integers, as `state_dict` gives them."""
    if dist.get_rank() == 0:
        model = run.model if prefix else inner(run.model)
        content = {"model": model.state_dict(), "optimizer": run.optimizer.state_dict(), **extras_of(run)}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path, _use_new_zipfile_serialization=zipped)


def load_file(run: TorchRun, path: Path) -> None:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    prefixed = all(key.startswith("module.") for key in content["model"])
    (run.model if prefixed else inner(run.model)).load_state_dict(content["model"])
    run.optimizer.load_state_dict(content["optimizer"])
    restore_extras(run, content)


FORMS = {
    "full": Form(lambda run, path: save_file(run, path, prefix=True), load_file),
    "full-bare": Form(lambda run, path: save_file(run, path, prefix=False), load_file),
    "full-nonzip": Form(lambda run, path: save_file(run, path, prefix=True, zipped=False), load_file),
}
