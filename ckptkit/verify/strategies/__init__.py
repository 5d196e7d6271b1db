"""One sharding strategy a file, each trained through its own API. The folder is the registry: files without a leading
underscore answer STRATEGIES."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ...errors import UsageError
from ..trace import StepRecord
from ..workload import Workload


@dataclass(frozen=True, slots=True)
class Options:
    """How to train. `details` are for one strategy alone: use_orig_params, a device mesh, a DeepSpeed configuration.

    `precision` "bf16" computes in bfloat16 from weights rounded to it and keeps fp32 weights for the optimizer.
    `clip` is the largest gradient norm, None for no clipping. `accumulate` is micro-batches a step.
    """

    precision: str = "fp32"
    optimizer: str = "adamw"
    clip: float | None = None
    accumulate: int = 1
    seed: int = 0
    device: str = "cpu"
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class FullState:
    """Everything a run holds, unsharded, on CPU, by clean names; the truth that a checkpoint is held against.

    `tensors` is keyed (fqn, slot): "value" for weights and buffers as the model holds them, "master" where the
    optimizer has fp32 weights of its own, then "exp_avg", "step", ... `groups` are the optimizer's groups with FQNs as
    "params". `aliases` maps a tied name to the name that owns the tensor; only the owner is in `tensors`.
    """

    tensors: dict[tuple[str, str], Tensor]
    groups: list[dict[str, Any]]
    aliases: dict[str, str]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    scheduler: dict[str, Any]
    step: int


class Run(Protocol):
    """A model being trained. All methods are collectives: every rank calls them."""

    done: int  # optimizer steps behind it

    def step(self) -> StepRecord:
        """Trains on the global batch number `done`."""

    def full_state(self) -> FullState:
        """Gathers everything, by hand where the framework's own gathering is not to be trusted."""

    def save(self, path: Path, form: str) -> None:
        """Writes a checkpoint with the strategy's own API, in one of its `forms`."""

    def load(self, path: Path, form: str) -> None:
        """Restores model, optimizer, scheduler and `done` with the strategy's own API."""


class Strategy(Protocol):
    """`forms` are the kinds of checkpoint that its runs write and read."""

    @property
    def name(self) -> str: ...

    @property
    def forms(self) -> tuple[str, ...]: ...

    @property
    def package(self) -> str | None:
        """The optional package that it needs, None for torch alone."""

    def build(self, workload: Workload, options: Options) -> Run: ...


def all_strategies() -> dict[str, Strategy]:
    """Every strategy by name, in the order of the files."""
    found: dict[str, Strategy] = {}
    for entry in pkgutil.iter_modules(__path__):
        if not entry.name.startswith("_"):
            module = importlib.import_module(f"{__name__}.{entry.name}")
            found.update({strategy.name: strategy for strategy in module.STRATEGIES})
    return found


def get_strategy(name: str) -> Strategy:
    """A strategy by its name, or by "pkg.mod:attribute" for one that lives elsewhere. Raises UsageError."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        outside: Strategy = getattr(importlib.import_module(module), attribute)
        return outside
    known = all_strategies()
    if name not in known:
        raise UsageError(f"unknown strategy {name!r}", hint=f"one of {', '.join(known)}")
    return known[name]


def check_form(strategy: str, form: str, forms: Sequence[str]) -> None:
    """Raises UsageError unless `form` is one of the strategy's."""
    if form not in forms:
        raise UsageError(f"{strategy} has no checkpoint form {form!r}", hint=f"one of {', '.join(forms)}")
