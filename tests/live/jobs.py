"""What the ranks run: build a strategy from other weights, load or save with ckptkit, train on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import ckptkit
from ckptkit.verify.strategies import Options, get_strategy
from ckptkit.verify.workload import Workload

OTHER_SEED = 77  # not the seed of the fixtures: what is not loaded is seen


def resume(
    source: str, strategy: str, factory: str, options: dict[str, Any], workload: dict[str, str], steps: int
) -> list[float]:
    """Collective. Load `source` into a fresh run of a strategy and train on: the losses of every step."""
    run: Any = get_strategy(strategy).build(Workload(**workload), Options(seed=OTHER_SEED, **options))
    model = run.engine if hasattr(run, "engine") else run.model
    optimizer = None if hasattr(run, "engine") else run.optimizer
    report = ckptkit.load(source, model, optimizer, run.scheduler, factory=factory)
    run.done = report.step or 0
    return [run.step().loss for _ in range(steps)]


def train_and_save(target: str, strategy: str, options: dict[str, Any], steps: int, **save: Any) -> list[float]:
    """Collective. Train, save with ckptkit, train on: the losses after the save."""
    run: Any = get_strategy(strategy).build(Workload(), Options(**options))
    for _ in range(steps):
        run.step()
    model = run.engine if hasattr(run, "engine") else run.model
    optimizer = None if hasattr(run, "engine") else run.optimizer
    ckptkit.save(target, model, optimizer, run.scheduler, step=run.done, extras={"note": {"tokens": 7}}, **save)
    dist.barrier()
    return [run.step().loss for _ in range(steps)]
