"""torchtitan: its checkpoints are understood, and it loads what is written for it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.checkpoint import Contents
from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor
from ckptkit.dialects import torchtitan
from ckptkit.errors import UsageError

from ..truth import DEFAULT_MODEL, differences, truth_of

Build = Callable[[str], Path]
W = Tensor.at(Constant(b"\0" * 4), (1,), "float32")


def _contents(tree: Any) -> Contents:
    return Contents("dcp", tree, "a test")


def test_claims_its_own_keys_alone() -> None:
    flat = {"state.a.w.step": W, "param_groups.a.w.lr": 0.1}
    assert torchtitan.claims(_contents({"a.w": W, "optimizer": flat, "train_state": {"step": 1}}))
    assert torchtitan.claims(_contents({"a.w": W, "train_state": {"step": 1}}))
    assert torchtitan.claims(_contents({"a.w": W})) is None
    assert torchtitan.claims(_contents({"a.w": W, "optimizer": {"state": {}, "param_groups": []}})) is None
    assert torchtitan.claims(_contents({"model": {"a.w": W}, "optimizer": flat, "rng": W})) is None


@pytest.mark.slow
def test_writes_the_keys_that_torchtitan_writes(fixture_dir: Build, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("torchtitan"))
    checkpoint = ckptkit.open(truth.path)
    assert checkpoint.dialect == "torchtitan" and checkpoint.step == truth.info["step"]
    assert checkpoint.extras["train_state"]["ntokens_seen"] == 132 * truth.info["step"]
    assert [len(group["params"]) for group in checkpoint.param_groups] == [
        len(group["params"]) for group in truth.info["param_groups"]
    ]
    ckptkit.convert(truth.path, tmp_path / "out", to="dcp", dialect="torchtitan", world_size=3, allow_drop=True)
    theirs, ours = (pickle.loads((path / ".metadata").read_bytes()) for path in (truth.path, tmp_path / "out"))
    assert theirs.planner_data == ours.planner_data
    for key, item in theirs.state_dict_metadata.items():
        assert getattr(ours.state_dict_metadata[key], "size", None) == getattr(item, "size", None), key
    assert differences(ckptkit.open(tmp_path / "out", model=DEFAULT_MODEL), truth) == []


@pytest.mark.slow
def test_torchtitan_trains_on_from_what_is_written(fixture_dir: Build, tmp_path: Path, pool: Any) -> None:
    folder = fixture_dir("ddp-full")
    truth = truth_of(folder)
    out = tmp_path / "out"
    report = ckptkit.convert(
        truth.path, out, to="dcp", dialect="torchtitan", world_size=2, model=DEFAULT_MODEL, allow_drop=True
    )
    assert any("exclude_from_loading" in text for text in report.plan.warnings)
    resumed = pool.run("tests.formats.torch_jobs:resume_torchtitan", world_size=3, path=str(out))[0]
    for key, tensor in truth.tensors.items():
        assert torch.equal(resumed.state.tensors[key], tensor), key
    expected = json.loads((folder / "continue.json").read_text())["losses"]
    assert resumed.losses == pytest.approx(expected, rel=1e-6, abs=0)
    written = ckptkit.open(out, model=DEFAULT_MODEL)
    assert written.dialect == "torchtitan" and differences(written, truth) == []
    assert written.extras["note"] == ckptkit.open(truth.path, model=DEFAULT_MODEL).extras["note"]


@pytest.mark.slow
def test_other_containers_are_refused(fixture_dir: Build, tmp_path: Path) -> None:
    path = truth_of(fixture_dir("torchtitan")).path
    with pytest.raises(UsageError, match="torchtitan does not load full"):
        ckptkit.convert(path, tmp_path / "out", to="full", dialect="torchtitan")
