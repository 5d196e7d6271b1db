"""`ckptkit.save`: a live model of every strategy saved in every format goes on elsewhere with the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptkit

from ..resume.matrix import STEPS, worst
from ..truth import DEFAULT_MODEL

pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp1", "fsdp2", "fsdp2-hybrid", "zero1", "zero2", "zero3")
FORMATS: dict[str, dict[str, Any]] = {
    "dcp": {"format": "dcp"},
    "full": {"format": "full", "optimizer_keys": "id"},
    "zero3": {"format": "zero3", "world_size": 3},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_saved_run_goes_on_in_another_strategy(strategy: str, pool: Any, tmp_path: Path) -> None:
    size = 4 if "hybrid" in strategy else 2
    for name, options in FORMATS.items():
        target = tmp_path / name
        wanted = pool.run(
            "tests.live.jobs:train_and_save", world_size=size, target=str(target), strategy=strategy, options={},
            steps=STEPS, save=options,
        )[0]  # fmt: skip
        other = "zero2" if strategy.startswith("fsdp") else "fsdp2"
        cell = {"source": str(target), "factory": DEFAULT_MODEL, "options": {}, "workload": {}}
        (went_on,) = pool.run("tests.live.jobs:resume_each", world_size=3, cells=[cell], strategy=other, steps=STEPS)[0]
        assert not isinstance(went_on, str), went_on
        assert worst(went_on, wanted) < 1e-6
        saved = ckptkit.open(target, model=DEFAULT_MODEL)
        assert (saved.step, saved.extras["note"]) == (STEPS, {"tokens": 7})
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left == []


def test_a_failure_reaches_every_rank_and_leaves_nothing(pool: Any, tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    errors = pool.run("tests.live.jobs:save_error", world_size=2, target=str(target))
    assert [kind for kind, _ in errors] == ["ExistsError", "ExistsError"]
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
