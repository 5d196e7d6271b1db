"""What a training script keeps beside model and optimizer: scheduler, step count, random states, a note of its own."""

from __future__ import annotations

import random
from typing import Any

import torch


def extras_of(run: Any) -> dict[str, Any]:
    """The extras as a training script would put them into its checkpoint."""
    return {
        "scheduler": run.scheduler.state_dict(),
        "step": run.done,
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "note": {"epoch": 1, "tokens_seen": 132 * run.done, "best_loss": 2.5, "tags": ["a", "b"]},
    }


def restore_extras(run: Any, extras: dict[str, Any]) -> None:
    run.scheduler.load_state_dict(extras["scheduler"])
    run.done = int(extras["step"])
