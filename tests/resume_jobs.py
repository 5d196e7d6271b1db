"""What a rank runs to resume from a converted checkpoint with plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptkit.verify.strategies import Options, get_strategy
from ckptkit.verify.workload import Workload
from fixtures.catalog import STEPS


def resume(
    strategy: str, form: str, path: str, workload: dict[str, Any] | None = None, options: dict[str, Any] | None = None
) -> list[float]:
    """Collective. The losses of the steps after a checkpoint, loaded over other weights by the strategy's own API."""
    run: Any = get_strategy(strategy).build(Workload(**(workload or {})), Options(**{**(options or {}), "seed": 99}))
    run.load(Path(path), form)
    run.done = STEPS
    return [run.step().loss for _ in range(STEPS)]
