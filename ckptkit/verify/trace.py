"""What one training run left behind, as plain values: the contract between those who train and those who compare.

Whoever trains (a strategy on a pool of processes, a recorder inside somebody's script) fills a `Trace`; comparing,
diagnosing and reporting read nothing else. No torch here, so that reports open where torch is not installed.
`ckptkit.verify.summary` makes the `TensorSummary` of a live tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

Status = Literal["ran", "not run", "failed"]
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    `step` counts optimizer steps from 0. `loss` is the mean over ranks and micro-batches (in script mode: this rank's
    own), taken in the forward pass *before* the update. `grad_norm` is the global 2-norm of the full gradient as the
    backward pass left it (averaged over ranks and micro-batches, before clipping); `applied_norm` is the norm that the
    optimizer was given (after clipping and unscaling). Either is None where the strategy does not tell.
    `lrs` has one learning rate per parameter group. `data` is a fingerprint of the batch, equal for equal batches.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    lrs: tuple[float, ...] = ()
    applied_norm: float | None = None
    data: str | None = None


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A whole (unsharded) tensor in a few numbers: enough to tell bit-equality and to measure an update.

    `dtype` without "torch."; `norm` (2-norm) and `mean` are computed in fp64; `checksum` is over the raw bytes, so two
    tensors are bit-equal if shape, dtype and checksum are; `sample` holds the values at fixed, evenly spread places
    that depend on the number of elements alone, so samples of the same tensor at two times can be subtracted.
    """

    shape: tuple[int, ...]
    dtype: str
    norm: float
    mean: float
    checksum: str
    sample: tuple[float, ...] = ()

    def same_bits(self, other: TensorSummary) -> bool:
        return (self.shape, self.dtype, self.checksum) == (other.shape, other.dtype, other.checksum)


Summaries = Mapping[str, TensorSummary]


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of one strategy (or of one rank of a script).

    Weights are keyed by clean FQN. `initial` is taken before step 0, `after_first` after step 0, `final` at the end.
    `optimizer_first` and `optimizer` hold the optimizer states after step 0 and at the end, keyed `fqn:slot`
    (`layers.0.weight:exp_avg`, `layers.0.weight:step`, `layers.0.weight:master`). `groups` names, per FQN, the
    hyper-parameters of its parameter group (`{"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.95)}`).
    A trace that is not "ran" says why in `reason`; it may still hold the steps up to the failure.
    """

    label: str
    strategy: str
    world_size: int
    precision: str
    steps: tuple[StepRecord, ...] = ()
    initial: Summaries = field(default_factory=dict)
    after_first: Summaries = field(default_factory=dict)
    final: Summaries = field(default_factory=dict)
    optimizer_first: Summaries = field(default_factory=dict)
    optimizer: Summaries = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    status: Status = "ran"
    reason: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(record.loss for record in self.steps)

    @staticmethod
    def not_run(label: str, strategy: str, reason: str, *, world_size: int = 0, precision: str = "") -> Trace:
        """A strategy that was asked for and could not be tried (its package is missing): never counts as passed."""
        return Trace(label, strategy, world_size, precision, status="not run", reason=reason)

    @staticmethod
    def failed(label: str, strategy: str, reason: str, *, world_size: int = 0, precision: str = "") -> Trace:
        """A strategy that was tried and raised; `reason` ends with the tail of its traceback."""
        return Trace(label, strategy, world_size, precision, status="failed", reason=reason)


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """A JSON-able dict; non-finite numbers become the strings "nan", "inf", "-inf" (JSON has no word for them)."""
    return {
        "schema": SCHEMA,
        "label": trace.label,
        "strategy": trace.strategy,
        "world_size": trace.world_size,
        "precision": trace.precision,
        "status": trace.status,
        "reason": trace.reason,
        "steps": [step_to_json(record) for record in trace.steps],
        "initial": summaries_to_json(trace.initial),
        "after_first": summaries_to_json(trace.after_first),
        "final": summaries_to_json(trace.final),
        "optimizer_first": summaries_to_json(trace.optimizer_first),
        "optimizer": summaries_to_json(trace.optimizer),
        "groups": {name: {k: _plain(v) for k, v in group.items()} for name, group in trace.groups.items()},
        "environment": dict(trace.environment),
    }


def trace_from_json(data: Mapping[str, Any]) -> Trace:
    """The inverse of `trace_to_json`. Raises ValueError for another schema and KeyError for a missing field."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"a trace of schema {data.get('schema')!r}; this version reads schema {SCHEMA}")
    return Trace(
        label=data["label"],
        strategy=data["strategy"],
        world_size=data["world_size"],
        precision=data["precision"],
        status=cast(Status, data["status"]),
        reason=data["reason"],
        steps=tuple(step_from_json(item) for item in data["steps"]),
        initial=summaries_from_json(data["initial"]),
        after_first=summaries_from_json(data["after_first"]),
        final=summaries_from_json(data["final"]),
        optimizer_first=summaries_from_json(data["optimizer_first"]),
        optimizer=summaries_from_json(data["optimizer"]),
        groups={name: {k: _parsed(v) for k, v in group.items()} for name, group in data["groups"].items()},
        environment=dict(data["environment"]),
    )


def write_trace(trace: Trace, path: Path) -> None:
    path.write_text(json.dumps(trace_to_json(trace), allow_nan=False), encoding="utf-8")


def read_trace(path: Path) -> Trace:
    return trace_from_json(json.loads(path.read_text(encoding="utf-8")))


def number_to_json(value: float | None) -> float | str | None:
    """Floats as JSON knows them; "nan", "inf" and "-inf" for the three that it does not."""
    return value if value is None or math.isfinite(value) else str(value)


def number_from_json(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def step_to_json(record: StepRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "loss": number_to_json(record.loss),
        "grad_norm": number_to_json(record.grad_norm),
        "applied_norm": number_to_json(record.applied_norm),
        "lrs": [number_to_json(lr) for lr in record.lrs],
        "data": record.data,
    }


def step_from_json(item: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step=item["step"],
        loss=float(item["loss"]),
        grad_norm=number_from_json(item["grad_norm"]),
        applied_norm=number_from_json(item["applied_norm"]),
        lrs=tuple(float(lr) for lr in item["lrs"]),
        data=item["data"],
    )


def summaries_to_json(summaries: Summaries) -> dict[str, Any]:
    return {
        name: {
            "shape": list(s.shape),
            "dtype": s.dtype,
            "norm": number_to_json(s.norm),
            "mean": number_to_json(s.mean),
            "checksum": s.checksum,
            "sample": [number_to_json(v) for v in s.sample],
        }
        for name, s in summaries.items()
    }


def summaries_from_json(data: Mapping[str, Any]) -> dict[str, TensorSummary]:
    return {
        name: TensorSummary(
            shape=tuple(item["shape"]),
            dtype=item["dtype"],
            norm=float(item["norm"]),
            mean=float(item["mean"]),
            checksum=item["checksum"],
            sample=tuple(float(v) for v in item["sample"]),
        )
        for name, item in data.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return number_to_json(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _parsed(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_parsed(item) for item in value)
    return float(value) if value in ("nan", "inf", "-inf") else value
