"""Checkpoints through torch.distributed.checkpoint and `get_state_dict`, the same for DDP, FSDP1 and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ._extras import extras_of, restore_extras
from ._loop import Form, TorchRun


def save_dcp(run: TorchRun, path: Path, *, flat: bool = False) -> None:
    """`flat` joins the optimizer's keys into one level (`flatten_optimizer_state_dict`), as torchtitan does."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer, **_plain_extras(run)}, checkpoint_id=str(path))


def load_dcp(run: TorchRun, path: Path, *, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    content: dict[str, Any] = {"model": model, "optimizer": optimizer, **_plain_extras(run)}
    dcp.load(content, checkpoint_id=str(path))
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=options,
    )
    restore_extras(run, content)


def _plain_extras(run: TorchRun) -> dict[str, Any]:
    extras = extras_of(run)
    return {"scheduler": extras["scheduler"], "step": extras["step"], "rng": extras["rng"]["torch"]}


FORMS = {
    "dcp": Form(save_dcp, load_dcp),
    "dcp-flat": Form(
        lambda run, path: save_dcp(run, path, flat=True), lambda run, path: load_dcp(run, path, flat=True)
    ),
}
