"""Controls of the resume matrix: each fault is planted into a right conversion, and the losses show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.conversion import Options, write_checkpoint
from ckptkit.core.box import Box, whole
from ckptkit.core.place import Constant
from ckptkit.core.spec import Piece, Tensor, TensorKey
from ckptkit.opened import OpenCheckpoint, read_tensor

from ..truth import truth_of
from .matrix import STEPS, TARGETS, WORLD_SIZE, expected, worst

pytestmark = pytest.mark.slow
SEEN = 3e-6  # relative: a right conversion stays below 1e-6
ONE, OTHER = "blocks.0.query.weight", "blocks.1.query.weight"


def moments_swapped(checkpoint: OpenCheckpoint, other: OpenCheckpoint) -> OpenCheckpoint:
    entries = dict(checkpoint.entries)
    for slot in ("exp_avg", "exp_avg_sq"):
        a, b = TensorKey(ONE, slot), TensorKey(OTHER, slot)
        entries[a], entries[b] = entries[b], entries[a]
    return replace(checkpoint, entries=entries)


def step_off_by_one(checkpoint: OpenCheckpoint, other: OpenCheckpoint) -> OpenCheckpoint:
    import struct

    entries = {
        key: Tensor.at(Constant(struct.pack("<f", float(read_tensor(tensor)) + 1)), (), "float32", "optim")
        if key.slot == "step"
        else tensor
        for key, tensor in checkpoint.entries.items()
    }
    return replace(checkpoint, entries=entries)


def one_shard_of_another_step(checkpoint: OpenCheckpoint, other: OpenCheckpoint) -> OpenCheckpoint:
    """The first half of the rows of every weight from the checkpoint, the rest from another step of the run."""
    entries = dict(checkpoint.entries)
    for key, tensor in checkpoint.entries.items():
        if key.slot == "value" and tensor.spec.role == "param" and tensor.spec.shape:
            rows = tensor.spec.shape[0] // 2
            sizes = (rows, *tensor.spec.shape[1:])
            mine = read_tensor(tensor)[:rows].contiguous().numpy().tobytes()
            piece = Piece(Box((0,) * len(sizes), sizes), Constant(mine), tensor.spec.dtype)
            entries[key] = replace(tensor, pieces=((piece, *other.entries[key].pieces) if rows else tensor.pieces))
    return replace(checkpoint, entries=entries)


def weight_decay_exchanged(checkpoint: OpenCheckpoint, other: OpenCheckpoint) -> OpenCheckpoint:
    first, second = checkpoint.param_groups
    groups = [
        {**first, "weight_decay": second["weight_decay"]},
        {**second, "weight_decay": first["weight_decay"]},
    ]
    return replace(checkpoint, param_groups=groups)


def padding_misplaced(checkpoint: OpenCheckpoint, other: OpenCheckpoint) -> OpenCheckpoint:
    """Every weight as if a flat vector had been cut one element too early: the values move on by one."""
    entries = dict(checkpoint.entries)
    for key, tensor in checkpoint.entries.items():
        if key.slot == "value" and tensor.spec.role == "param" and tensor.spec.dtype == "float32":
            moved = read_tensor(tensor).flatten().roll(1).numpy().tobytes()
            place = Piece(whole(tensor.spec.shape), Constant(moved), "float32")
            entries[key] = replace(tensor, pieces=(place,))
    return replace(checkpoint, entries=entries)


FAULTS = (moments_swapped, step_off_by_one, one_shard_of_another_step, weight_decay_exchanged, padding_misplaced)


@pytest.mark.parametrize("target", ["DDP full", "FSDP2 (DCP)", "ZeRO-2", "ZeRO-3"])
def test_every_fault_is_seen(target: str, pool: Any, fixture_dir: Callable[[str], Path], tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("fsdp2-dcp"))
    # Another step of the same run: the weights of a run that was clipped part from it.
    other = ckptkit.open(truth_of(fixture_dir("fsdp2-dcp-sgd")).path)
    source = ckptkit.open(truth.path, model=truth.model)
    options = Options(**TARGETS[target].convert)
    planted: list[tuple[str, Callable[..., OpenCheckpoint]]] = [(f.__name__, f) for f in FAULTS]
    for name, plant in [("none", lambda checkpoint, _: checkpoint), *planted]:
        write_checkpoint(plant(source, other), tmp_path / name, options)
    cells = [{"path": str(tmp_path / name), "options": {}, "workload": {}} for name in ("none", *dict(planted))]
    results = pool.run(
        "tests.resume.jobs:resume_all", world_size=WORLD_SIZE, cells=cells, strategy=TARGETS[target].strategy,
        form=TARGETS[target].form, steps=STEPS,
    )  # fmt: skip
    gaps = {
        name: worst(computed, expected(truth))
        for name, computed in zip(("none", *dict(planted)), results[0], strict=True)
    }
    assert gaps.pop("none") < 1e-6
    assert {name: gap for name, gap in gaps.items() if not gap > SEEN} == {}
