"""`ckptkit.load`: the resume matrix from the source side, straight into live models of every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit

from ..resume.matrix import SOURCES, STEPS, expected, worst
from ..truth import truth_of

pytestmark = pytest.mark.slow
LIVE = {
    "ddp": 3,
    "fsdp1": 3,
    "fsdp1-flat": 3,
    "fsdp2": 3,
    "fsdp2-hybrid": 4,
    "zero0": 3,
    "zero1": 3,
    "zero2": 3,
    "zero3": 3,
}
BF16 = {"zero1-bf16": ("zero1", "zero2", "zero3", "fsdp2"), "fsdp2-dcp-bf16": ("zero3", "fsdp1", "fsdp2")}


def _cells(names: list[str], fixture_dir: Callable[[str], Path]) -> list[dict[str, Any]]:
    cells = []
    for name in names:
        truth = truth_of(fixture_dir(name))
        options = {key: value for key, value in truth.info["options"].items() if key != "details"}
        cells.append(
            {"source": str(truth.path), "factory": truth.model, "options": options, "workload": truth.info["workload"]}
        )
    return cells


@pytest.mark.parametrize("strategy", LIVE)
def test_every_source_into_a_live_model(strategy: str, pool: Any, fixture_dir: Callable[[str], Path]) -> None:
    names = list(SOURCES.values())
    cells = _cells(names, fixture_dir)
    name = strategy
    if strategy == "fsdp1-flat":
        # use_orig_params=False: groups must not cut through a unit, so only sources with such groups fit.
        names = ["fsdp1-local-flatparam", "fsdp1-full-flatparam"]
        cells, name = _cells(names, fixture_dir), "fsdp1"
        for cell in cells:
            cell["options"] = {**cell["options"], "details": {"use_orig_params": False}}
    results = pool.run(
        "tests.live.jobs:resume_each", world_size=LIVE[strategy], cells=cells, strategy=name, steps=STEPS
    )
    failed = {n: r for n, r in zip(names, results[0], strict=True) if isinstance(r, str)}
    assert not failed, "\n".join(f"{n}: {text}" for n, text in failed.items())
    gaps = {n: worst(r, expected(truth_of(fixture_dir(n)))) for n, r in zip(names, results[0], strict=True)}
    assert {n: gap for n, gap in gaps.items() if gap > 1e-6} == {}


@pytest.mark.parametrize("source", BF16)
def test_bf16_into_a_live_model(source: str, pool: Any, fixture_dir: Callable[[str], Path]) -> None:
    wanted = expected(truth_of(fixture_dir(source)))
    for strategy in BF16[source]:
        results = pool.run(
            "tests.live.jobs:resume_each", world_size=2, cells=_cells([source], fixture_dir), strategy=strategy,
            steps=STEPS,
        )  # fmt: skip
        assert not isinstance(results[0][0], str), results[0][0]
        assert worst(results[0][0], wanted) < 5e-3


def test_each_rank_reads_about_its_share(pool: Any, fixture_dir: Callable[[str], Path]) -> None:
    """Not a gather on every rank: the bytes that each of two ranks reads for FSDP2 are near half of what one reads."""
    (cell,) = _cells(["fsdp2-dcp-ws3"], fixture_dir)
    alone = pool.run("tests.live.jobs:bytes_read", world_size=1, strategy="fsdp2", **cell)
    shared = pool.run("tests.live.jobs:bytes_read", world_size=2, strategy="fsdp2", **cell)
    assert max(shared) < 0.6 * alone[0]


def test_errors_name_every_fault(pool: Any, fixture_dir: Callable[[str], Path]) -> None:
    cell = {"source": str(truth_of(fixture_dir("fsdp2-dcp")).path), "strategy": "ddp"}
    (first, *_) = pool.run("tests.live.jobs:load_errors", world_size=1, **cell)
    assert first["other model"][0] == "SourceError"
    assert any("is not in the checkpoint" in fault for fault in first["other model"][1])
    assert any("the model has [3, 5], the checkpoint" in fault for fault in first["other model"][1])
    assert first["optimizer of another model"][0] == "UsageError"


def test_a_model_whose_only_child_is_called_module(tmp_path: Path) -> None:
    """Its names look like those of a DDP wrapper, which a file does not tell apart; the model does."""
    saved, fresh = (torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)}) for _ in range(2))
    torch.save({"model": saved.state_dict()}, tmp_path / "a.pt")
    ckptkit.load(tmp_path / "a.pt", fresh)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in fresh.state_dict().items())


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp1-flat", "fsdp2"])
def test_ranks_that_hold_nothing_of_a_parameter(strategy: str, pool: Any, tmp_path: Path) -> None:
    """FSDP2 steps empty shards too, and FSDP1's flat ranks know the names that lie on other ranks only."""
    from .jobs import tiny_losses, tiny_model

    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tiny_losses(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    answers = pool.run(
        "tests.live.jobs:tiny_resume", world_size=3, source=str(tmp_path / "a.pt"), target=str(tmp_path / "saved"),
        strategy=strategy,
    )  # fmt: skip
    assert ckptkit.diff(tmp_path / "a.pt", tmp_path / "saved", model="tests.live.jobs:tiny_model").differences == ()
    losses = [each[0] for each in answers]
    assert {step for _, steps in answers for step in steps} == {3.0}
    wanted = tiny_losses(model, optimizer, range(3, 6))
    assert worst(losses[0], wanted) < 1e-6
    assert worst(losses[0], tiny_losses(tiny_model(), optimizer, range(3, 6))) > 1e-3  # the control: nothing loaded
