"""The ports of DeepSpeed's schedulers against the schedulers themselves, update by update."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ckptkit.migrate.schedules import PORTS

pytestmark = pytest.mark.slow
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "warmup": ("WarmupLR", {"warmup_num_steps": 7}),
    "warmup, linear": ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_num_steps": 5, "warmup_type": "linear"}),
    "decay": ("WarmupDecayLR", {"total_num_steps": 20, "warmup_max_lr": 0.3, "warmup_num_steps": 4}),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 25, "warmup_num_steps": 6, "warmup_min_ratio": 0.1}),
    "cosine, linear": ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 2, "warmup_type": "linear"}),
    "range": ("LRRangeTest", {"lr_range_test_min_lr": 0.02, "lr_range_test_step_size": 3}),
    "range, stairs": ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
    "cycle": ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 6}),
    "cycle, decay": (
        "OneCycle",
        {
            "cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5, "cycle_second_step_size": 9,
            "decay_lr_rate": 0.5, "decay_step_size": 3, "decay_mom_rate": 0.001,
        },
    ),
    "cycle, stairs": (
        "OneCycle",
        {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1, "cycle_first_step_size": 8, "cycle_first_stair_count": 3},
    ),
}  # fmt: skip


def rates(make: Callable[[Any], Any]) -> list[tuple[float, float]]:
    """(rate, first beta) before each of 31 updates."""
    import torch

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.2)
    scheduler = make(optimizer)
    found = []
    for _ in range(31):
        [group] = optimizer.param_groups
        found.append((float(group["lr"]), float(group["betas"][0])))
        optimizer.step()
        scheduler.step()
    return found


def ported(kind: str, given: dict[str, Any]) -> Callable[[Any], Any]:
    import torch

    one = PORTS[kind]
    space: dict[str, Any] = {"torch": torch, "math": math}
    exec(one.text.replace("TORCH", "torch").replace("MATH", "math"), space)
    arguments = {one.renamed[name]: value for name, value in given.items()}
    if "log" in arguments:
        arguments["log"] = arguments["log"] != "linear"
    if kind == "WarmupCosineLR":
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, partial(space[one.name], **arguments))
    return lambda optimizer: space[one.name](optimizer, **arguments)


@pytest.mark.parametrize(("kind", "given"), CASES.values(), ids=CASES)
def test_each_update_runs_at_deepspeeds_rate(kind: str, given: dict[str, Any]) -> None:
    from deepspeed.runtime import lr_schedules

    mine = rates(ported(kind, given))
    theirs = rates(lambda optimizer: getattr(lr_schedules, kind)(optimizer, **given))
    assert mine == [pytest.approx(pair, rel=1e-12, abs=1e-15) for pair in theirs]
    assert len(set(mine)) > 2 and mine[1:] != theirs[:-1]  # a schedule that is one update late would be seen


def test_all_ports_are_compared() -> None:
    assert {kind for kind, _ in CASES.values()} == set(PORTS)
