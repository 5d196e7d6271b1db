"""The rows and columns of the resume matrix, and what a cell needs: a converted checkpoint and the losses to expect."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ckptkit

from ..truth import Truth, truth_of

STEPS = 3
WORLD_SIZE = 3  # the sources were written by two ranks
SOURCES = {
    "DDP full": "ddp-full",
    "FSDP1 full": "fsdp1-full",
    "FSDP1 sharded (DCP)": "fsdp1-sharded-dcp",
    "FSDP1 per rank": "fsdp1-ranks",
    "FSDP1 local": "fsdp1-local-flatparam",
    "FSDP2 (DCP)": "fsdp2-dcp",
    "FSDP2 per rank": "fsdp2-ranks",
    "ZeRO-0": "zero0",
    "ZeRO-1": "zero1",
    "ZeRO-2": "zero2",
    "ZeRO-3": "zero3",
    "universal": "universal-zero1",
}


@dataclass(frozen=True)
class Target:
    """A column: what `convert` is asked for, and which strategy's own loader takes it.

    DeepSpeed leaves buffers and frozen parameters at their initial values when it loads a universal checkpoint: that
    column's jobs put them back by hand, as the plan's warning says that one must.
    """

    strategy: str
    form: str
    convert: dict[str, Any] = field(default_factory=dict)


TARGETS = {
    "DDP full": Target("ddp", "full", {"to": "full", "optimizer_keys": "id", "prefix": "module."}),
    "FSDP1 full": Target("fsdp1", "full", {"to": "full"}),
    "FSDP1 sharded": Target("fsdp1", "sharded-dcp", {"to": "dcp", "world_size": WORLD_SIZE}),
    "FSDP2 (DCP)": Target("fsdp2", "dcp", {"to": "dcp", "world_size": WORLD_SIZE}),
    "ZeRO-1": Target("zero1", "native", {"to": "zero1", "world_size": WORLD_SIZE}),
    "ZeRO-2": Target("zero2", "native", {"to": "zero2", "world_size": WORLD_SIZE}),
    "ZeRO-3": Target("zero3", "native", {"to": "zero3", "world_size": WORLD_SIZE}),
    "universal": Target("zero1", "universal", {"to": "universal"}),
}


def convert_cell(truth: Truth, target: Target, out: Path, **more: Any) -> dict[str, Any]:
    """Convert a fixture for a target; the cell for `jobs.resume_all`."""
    report = ckptkit.convert(truth.path, out, model=truth.model, **{**target.convert, **more})
    assert report.plan.drops == () or more.get("allow_drop"), report.plan.drops
    options = {key: value for key, value in truth.info["options"].items() if key != "details"}
    return {"path": str(out), "options": options, "workload": truth.info["workload"]}


def expected(truth: Truth) -> list[float]:
    """The losses of the uninterrupted run after the checkpoint."""
    losses: list[float] = json.loads((truth.folder / "continue.json").read_text())["losses"]
    return losses


def run_column(
    pool: Any, fixture_dir: Callable[[str], Path], names: list[str], target: Target, folder: Path, **more: Any
) -> dict[str, tuple[list[float] | str, list[float]]]:
    """Every named fixture through one target: what was computed and what was expected, by fixture."""
    truths = {name: truth_of(fixture_dir(name)) for name in names}
    cells = [convert_cell(truth, target, folder / name, **more) for name, truth in truths.items()]
    results = pool.run(
        "tests.resume.jobs:resume_all", world_size=WORLD_SIZE, cells=cells, strategy=target.strategy,
        form=target.form, steps=STEPS,
    )  # fmt: skip
    return {name: (results[0][index], expected(truth)) for index, (name, truth) in enumerate(truths.items())}


def worst(computed: list[float], wanted: list[float]) -> float:
    """The largest relative difference of a step's loss; infinite for anything that is no number."""
    if len(computed) != len(wanted):
        return float("inf")
    gaps = [abs(a - b) / abs(b) for a, b in zip(computed, wanted, strict=True)]
    return max(gap if gap == gap else float("inf") for gap in gaps)
