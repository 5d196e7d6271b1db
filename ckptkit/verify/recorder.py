"""Watches a training script from inside its process and stops it after N steps.

Recorded are losses, gradient norms, learning rates, weights and fingerprints of the batches.

A step is an optimizer step that followed a backward pass. Its loss is the sum of what was backpropagated since the last
one, so a script that divides by its micro-batches and DeepSpeed's engine, which does it for the script, report alike.
What is recorded goes to files at once, so a script that dies later has still said what it computed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from . import recorder_norms, recorder_weights
from .script_hook import FOLDER
from .trace import StepRecord, Summaries, step_to_json, summaries_to_json

STEPS = "CKPTKIT_VERIFY_STEPS"
DEVICE = "CKPTKIT_VERIFY_DEVICE"
STOP_IF_RANKS_DIFFER = "CKPTKIT_VERIFY_STOP_IF_RANKS_DIFFER"
LARGEST = 50_000_000  # elements; larger models are compared by losses and norms alone
WAIT_SECONDS = 60.0


@dataclass(slots=True)
class Recorder:
    """The state of the watch in one process."""

    folder: Path
    wanted: int
    losses: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    raw_norm: float | None = None
    applied_norm: float | None = None
    lrs: tuple[float, ...] = ()
    done: int = 0
    quiet: int = 0  # depth of calls whose inner backwards and steps are somebody else's business
    seeded_by_script: bool = False
    notes: dict[str, str] = field(default_factory=dict)

    def saw_backward(self, loss: torch.Tensor, scale: float = 1.0) -> None:
        """A backward pass from `loss` starts; `scale` is what a gradient scaler has multiplied it with."""
        if loss.numel() == 1:
            whole = getattr(loss.detach(), "full_tensor", loss.detach)()
            self.losses.append(float(whole) / scale)

    def before_step(self, optimizer: torch.optim.Optimizer, root: torch.nn.Module | None = None) -> None:
        """Collective. The gradients are whole and the weights are the old ones."""
        self.lrs = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        if root is None:
            self.applied_norm = recorder_norms.total_norm(p for g in optimizer.param_groups for p in g["params"])
        if self.done == 0 and self.losses:
            for group in optimizer.param_groups:
                self.note_dtype(group["params"][0].dtype if group["params"] else None)
            self.write_weights("initial", optimizer, root)

    def after_step(self, optimizer: torch.optim.Optimizer, root: torch.nn.Module | None = None) -> None:
        """Collective. Ends a step; a second optimizer that steps on the same backward passes belongs to the same."""
        if self.done == 0 and self.path("done").exists():
            self.stop()  # the script starts its processes once more; the first time was recorded
        if self.losses:
            raw = self.raw_norm if self.raw_norm is not None else self.applied_norm
            seen = "".join(self.batches) or None
            self.append(StepRecord(self.done, sum(self.losses), raw, self.lrs, self.applied_norm, seen))
            self.done += 1
        elif self.done == 0:
            return
        self.losses, self.batches, self.raw_norm, self.applied_norm = [], [], None, None
        if self.done == 1:
            self.write_weights("after_first", optimizer, root)
        if self.ranks_went_apart():
            self.notes["ranks_went_apart"] = "yes"
            if os.environ.get(STOP_IF_RANKS_DIFFER):
                self.stop()
        if self.done >= self.wanted:
            self.write_weights("final", optimizer, root)
            self.stop()

    def ranks_went_apart(self) -> bool:
        """Whether the ranks began to shard different weights and nobody made them equal."""
        return self.notes.get("ranks_start_alike") == "no" and self.notes.get("broadcast") != "yes"

    def note_dtype(self, dtype: torch.dtype | None) -> None:
        """Which low precision the script computes in, for the choice of the tolerance."""
        if dtype in (torch.bfloat16, torch.float16):
            self.notes["compute_dtype"] = "bf16" if dtype is torch.bfloat16 else "fp16"

    def append(self, record: StepRecord) -> None:
        with self.path("steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(step_to_json(record)) + "\n")
        self.path("notes.json").write_text(json.dumps(self.notes), encoding="utf-8")

    def write_weights(self, moment: str, optimizer: torch.optim.Optimizer, root: torch.nn.Module | None) -> None:
        """Collective. Summaries of the whole weights; of the optimizer states and groups after the first step."""
        root = root if root is not None else recorder_weights.root_of(optimizer)
        if root is None:
            return
        numel = recorder_weights.numel(root)
        if numel > LARGEST:
            self.notes["weights"] = f"not compared: {numel} elements a rank"
            return
        try:
            weights = recorder_weights.summaries(root)
            self.write_summaries(moment, weights)
            if moment == "after_first":
                self.write_summaries("optimizer_first", recorder_weights.states(root, optimizer))
                groups = recorder_weights.groups(root, optimizer)
                self.path("groups.json").write_text(json.dumps(groups, default=str), encoding="utf-8")
        except Exception as error:  # never break the script that is watched: its losses are the main thing
            self.notes["weights"] = f"not compared {moment}: {type(error).__name__}: {error}"

    def write_summaries(self, name: str, summaries: Summaries) -> None:
        if rank() == 0:
            self.path(f"{name}.json").write_text(json.dumps(summaries_to_json(summaries)), encoding="utf-8")

    def path(self, name: str) -> Path:
        return self.folder / f"rank{rank()}.{name}"

    def stop(self) -> None:
        """Ends this process once every rank has made its steps, so that no rank waits for one that left."""
        self.path("notes.json").write_text(json.dumps(self.notes), encoding="utf-8")
        self.path("done").touch()
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until and len(list(self.folder.glob("rank*.done"))) < world_size():
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


ACTIVE: Recorder | None = None


def start() -> None:
    """Called once per process, right after torch was imported."""
    global ACTIVE
    from . import recorder_seed, recorder_watch

    recorder = ACTIVE = Recorder(Path(os.environ[FOLDER]), int(os.environ[STEPS]))
    if os.environ.get(DEVICE) == "cpu":
        from . import cpu

        cpu.answer()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    recorder_seed.seed(recorder)
    recorder_watch.watch(recorder)
    recorder_seed.redirect_rendezvous()
