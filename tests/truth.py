"""What a fixture's live run held, and the comparison of a checkpoint with it, bit for bit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.transform import same_value
from ckptkit.opened import OpenCheckpoint

DEFAULT_MODEL = "ckptkit.verify.default_model:default_model"


@dataclass(frozen=True)
class Truth:
    """`tensors` by (fqn, slot), and the rest of truth.json."""

    folder: Path
    tensors: dict[tuple[str, str], torch.Tensor]
    info: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / self.info["path"]

    @property
    def model(self) -> str | None:
        """The factory of the model that was trained, for `--model`; None for Hugging Face's own."""
        if self.info["name"].startswith("hf-"):
            return None
        return self.info["workload"].get("model", DEFAULT_MODEL)

    def best(self) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors with masters in the place of the weights: what a target without masters should hold."""
        masters = {fqn: tensor for (fqn, slot), tensor in self.tensors.items() if slot == "master"}
        return {
            (fqn, slot): masters.get(fqn, tensor) if slot == "value" else tensor
            for (fqn, slot), tensor in self.tensors.items()
            if slot != "master"
        }


def truth_of(folder: Path) -> Truth:
    return Truth(
        folder,
        torch.load(folder / "truth.pt", weights_only=True),
        json.loads((folder / "truth.json").read_text()),
    )


def differences(checkpoint: OpenCheckpoint, truth: Truth, *, best: bool = False) -> list[str]:
    """Every way in which a checkpoint is not what the live run was. `best`: masters are expected as the weights."""
    expected = truth.best() if best else truth.tensors
    holds, lacks = set(truth.info["holds"]), set(truth.info.get("lacks", ()))
    found = []
    for (fqn, slot), tensor in expected.items():
        if (holds and slot not in holds) or fqn in lacks:
            continue
        try:
            read = checkpoint.read(fqn, slot)
        except KeyError as error:
            found.append(f"missing: {error}")
            continue
        if read.shape != tensor.shape or read.dtype != tensor.dtype:
            found.append(f"{fqn}[{slot}]: {read.dtype}{list(read.shape)}, not {tensor.dtype}{list(tensor.shape)}")
        elif not torch.equal(read.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)):
            found.append(f"{fqn}[{slot}]: values differ")
    known = {fqn for fqn, _ in expected} | set(truth.info["aliases"])
    found += [f"invented: {key}" for key in checkpoint.entries if key.slot != "extra" and key.fqn not in known]
    return found + group_differences(checkpoint, truth)


def group_differences(checkpoint: Checkpoint, truth: Truth) -> list[str]:
    """Hyper-parameters that differ, parameter by parameter."""
    if truth.info["holds"] and not any(slot.startswith("exp_avg") for slot in truth.info["holds"]):
        return []
    mine = {n: g for g in checkpoint.param_groups for n in g["params"]}
    found = []
    for group in truth.info["param_groups"]:
        for name in group["params"]:
            for key, value in group.items():
                if key == "params":
                    continue
                if name in mine and key not in mine[name] and "elastic" in truth.info["name"]:
                    continue  # DeepSpeed's elastic files hold no hyper-parameters, only what the scheduler knows
                if name not in mine:
                    found.append(f"{name} is in no group")
                elif not same_value(mine[name].get(key, "absent"), value):
                    found.append(f"{key} of {name}: {mine[name].get(key, 'absent')!r}, not {value!r}")
    return found
