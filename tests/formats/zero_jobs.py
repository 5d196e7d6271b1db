"""What a rank runs in these tests: load a checkpoint with the framework's own loader, gather everything, train on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptkit.verify.strategies import FullState, Options, get_strategy
from ckptkit.verify.workload import Workload


@dataclass(slots=True)
class Resumed:
    """What a run held after loading, and what it computed from there."""

    state: FullState
    losses: list[float]
    global_steps: int
    client: dict[str, Any]


def resume(
    strategy: str,
    path: str,
    *,
    form: str = "native",
    options: dict[str, Any] | None = None,
    workload: dict[str, str] | None = None,
    steps: int = 3,
) -> Resumed | None:
    """Collective. A run of another seed loads `path` and trains `steps` more; the answer of rank 0."""
    made = Options(**{**(options or {}), "seed": 5})
    run = get_strategy(strategy).build(Workload(**(workload or {})), made)
    client: dict[str, Any] = {}
    if form == "native":
        found, client = run.engine.load_checkpoint(path)
        assert found is not None
        run.done = run.engine.global_steps
    else:
        run.load(Path(path), form)
    engine = run.engine
    state = run.full_state()
    losses = [run.step().loss for _ in range(steps)]
    if torch.distributed.get_rank():
        return None
    return Resumed(state, losses, engine.global_steps - steps, {key: client.get(key) for key in ("note",)})


def train_on(strategy: str, path: str, out: str) -> None:
    """Collective. Load, train one step more, save with the engine."""
    run = get_strategy(strategy).build(Workload(), Options())
    run.load(Path(path), "native")
    run.step()
    run.save(Path(out), "native")


def to_universal(native: Path, out: Path) -> None:
    """DeepSpeed's own conversion, without processes of its own."""
    import argparse

    from deepspeed.checkpoint.ds_to_universal import main

    tag = (native / "latest").read_text()
    main(
        argparse.Namespace(
            input_folder=str(native / tag), output_folder=str(out / tag), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip
