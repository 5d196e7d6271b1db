"""Real DeepSpeed files, changed as older versions, other options or accidents would have left them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Edit = Callable[[dict[str, Any]], Any]


def copy_of(checkpoint: Path, target: Path) -> Path:
    """A copy to be changed; the fixtures themselves are shared by all tests."""
    shutil.copytree(checkpoint, target)
    return target


def tag_of(checkpoint: Path) -> Path:
    for pointer in ("latest", "latest_universal"):
        if (checkpoint / pointer).is_file():
            return checkpoint / (checkpoint / pointer).read_text().strip()
    return checkpoint


def edit(file: Path, change: Edit) -> None:
    """Load a file as DeepSpeed does, change it, save it as torch does."""
    pytest.importorskip("deepspeed")
    tree = torch.load(file, weights_only=False)
    answer = change(tree)
    torch.save(tree if answer is None else answer, file)


def edit_models(checkpoint: Path, change: Edit) -> None:
    for file in tag_of(checkpoint).glob("*_model_states.pt"):
        edit(file, change)


def edit_optims(checkpoint: Path, change: Edit) -> None:
    """`change` gets the optimizer's own part of each rank's file."""
    for file in sorted(tag_of(checkpoint).glob("*_optim_states.pt")):
        edit(file, lambda tree: change(tree["optimizer_state_dict"]))
