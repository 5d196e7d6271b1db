"""What `verify` is asked to train: one record for the strategies form and the state form. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """What to train under what. Empty tuples and None stand for the defaults: all strategies, both precisions, AdamW
    without and SGD with clipping, two ranks on CPU or one per GPU. `clip` 0 is no clipping."""

    strategies: tuple[str, ...] = ()
    model: str | None = None
    batch: str | None = None
    world_size: int | None = None
    steps: int = 10
    device: str = "auto"
    precisions: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    clip: float | None = None
    accumulate: int = 1
    seed: int = 0
    tolerance: float | None = None
