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
    """What a run held after loading, what it computed from there, and the optimizer's steps at the end."""

    state: FullState | None
    losses: list[float]
    steps: dict[str, float]
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
    repair: str | None = None,
    gather: bool = True,
) -> Resumed | None:
    """Collective. A run of another seed loads `path` and trains `steps` more; the answer of rank 0.

    `repair`: a truth.pt from which buffers and frozen parameters are set by hand, which DeepSpeed leaves alone when it
    loads a universal checkpoint. Without `gather` only the losses are of interest (ranks that do not agree).
    """
    made = Options(**{**(options or {}), "seed": 5})
    run = get_strategy(strategy).build(Workload(**(workload or {})), made)
    run.engine._config.load_universal_checkpoint = form == "universal"
    found, client = run.engine.load_checkpoint(path)
    assert found is not None
    run.done = run.engine.global_steps
    state = run.full_state() if gather else None
    if repair is not None:
        _set_the_rest(run.engine.module, torch.load(repair, weights_only=True))
    losses = [run.step().loss for _ in range(steps)]
    end = run.full_state() if gather else None
    counted = {fqn: float(t) for (fqn, slot), t in end.tensors.items() if slot == "step"} if end else {}
    if torch.distributed.get_rank():
        return None
    return Resumed(state, losses, counted, run.engine.global_steps - steps, {"note": client.get("note")})


def _set_the_rest(module: torch.nn.Module, tensors: dict[tuple[str, str], torch.Tensor]) -> None:
    frozen = [(name, p.data) for name, p in module.named_parameters() if not p.requires_grad]
    for name, held in (*frozen, *module.named_buffers()):
        if (name, "value") in tensors:
            held.copy_(tensors[name, "value"])


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
