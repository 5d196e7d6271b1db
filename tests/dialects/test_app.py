"""app: checkpoints of the DCP tutorial are understood, and its script loads what is written for it."""

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
from ckptkit.dialects import app
from ckptkit.errors import UsageError

from ..truth import DEFAULT_MODEL, differences, truth_of

Build = Callable[[str], Path]
W = Tensor.at(Constant(b"\0" * 4), (1,), "float32")


def test_claims_its_own_keys_alone() -> None:
    def claims(tree: Any) -> str | None:
        return app.claims(Contents("dcp", tree, "a test"))

    assert claims({"app": {"model": {"w": W}, "optim": {"state": {}, "param_groups": []}}})
    assert claims({"app": {"model": {"w": W}}, "epoch": 3})
    assert claims({"app": {"model": 3}}) is None
    assert claims({"app": {"w": W}}) is None
    assert claims({"model": {"w": W}}) is None


@pytest.mark.slow
def test_writes_the_keys_that_the_tutorial_writes(fixture_dir: Build, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("tutorial-app"))
    checkpoint = ckptkit.open(truth.path)
    assert checkpoint.dialect == "app"
    ckptkit.convert(truth.path, tmp_path / "out", to="dcp", dialect="app", world_size=3)
    theirs, ours = (pickle.loads((path / ".metadata").read_bytes()) for path in (truth.path, tmp_path / "out"))
    assert theirs.planner_data == ours.planner_data
    assert differences(ckptkit.open(tmp_path / "out", model=DEFAULT_MODEL), truth) == []


@pytest.mark.slow
def test_the_tutorial_trains_on_from_what_is_written(fixture_dir: Build, tmp_path: Path, pool: Any) -> None:
    folder = fixture_dir("ddp-full")
    truth = truth_of(folder)
    out = tmp_path / "out"
    ckptkit.convert(truth.path, out, to="dcp", dialect="app", world_size=2, model=DEFAULT_MODEL, allow_drop=True)
    resumed = pool.run("tests.formats.torch_jobs:resume_app", world_size=3, path=str(out))[0]
    for key, tensor in truth.tensors.items():
        assert torch.equal(resumed.state.tensors[key], tensor), key
    expected = json.loads((folder / "continue.json").read_text())["losses"]
    assert resumed.losses == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.slow
def test_other_containers_are_refused(fixture_dir: Build, tmp_path: Path) -> None:
    path = truth_of(fixture_dir("tutorial-app")).path
    with pytest.raises(UsageError, match="app is not written as safetensors"):
        ckptkit.convert(path, tmp_path / "out", to="safetensors", dialect="app", optimizer=True)
