"""hf-trainer: a Trainer's checkpoint-N is read, and what is written for it resumes in `Trainer.train`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.dialects import hf_trainer
from ckptkit.errors import AmbiguousError, LossError
from fixtures.make import find
from tests.cli.run import checkpoint
from tests.truth import differences, truth_of

from .resumes import continued, resumed

NAMES = ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-trainer", "hf-trainer-ddp"])
def test_what_the_trainer_wrote_is_read_without_being_told_the_order(
    name: str, fixture_dir: Callable[[str], Path]
) -> None:
    truth = truth_of(fixture_dir(name))
    opened = ckptkit.open(truth.path)
    assert (opened.dialect, opened.step) == ("hf-trainer", truth.info["step"])
    assert differences(opened, truth) == []
    assert set(opened.extras["rng"]) == set(range(truth.info["world_size"]))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["straight", "through full", "through dcp"])
def test_the_trainer_goes_on_from_what_is_written(
    way: str, fixture_dir: Callable[[str], Path], tmp_path: Path, pool: Any
) -> None:
    source = fixture_dir("hf-trainer")
    truth = truth_of(source)
    path = truth.path
    if way != "straight":
        ckptkit.convert(path, tmp_path / "between", to=way.split()[1])
        path = tmp_path / "between"
    target = tmp_path / "out" / find("hf-trainer").path
    ckptkit.convert(path, target, to="safetensors", dialect="hf-trainer")
    assert resumed(pool, "hf-trainer", tmp_path / "out", 1) == pytest.approx(continued(source), rel=1e-6)
    if way == "straight":  # the control: with the moments of another step the losses are others
        optimizer = torch.load(target / "optimizer.pt")
        for slots in optimizer["state"].values():
            slots["exp_avg"].zero_()
        torch.save(optimizer, target / "optimizer.pt")
        losses = resumed(pool, "hf-trainer", tmp_path / "out", 1)
        assert losses[-1] != pytest.approx(continued(source)[-1], rel=1e-5)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a.pt", rng={0: {"cpu": torch.get_rng_state()}, 1: {"cpu": torch.get_rng_state()}})
    ckptkit.convert(source, tmp_path / "checkpoint-3", to="safetensors", dialect="hf-trainer")
    names = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert names == {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth",
                     "trainer_state.json"}  # fmt: skip
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3
    with pytest.raises(AmbiguousError):
        ckptkit.open(tmp_path / "checkpoint-3")  # ids, and weights sorted by name
    back = ckptkit.open(tmp_path / "checkpoint-3", param_names=NAMES)
    found = ckptkit.diff(source, back).differences
    assert [str(each) for each in found] == ["extra trainer_state: only in b"]


def test_what_the_trainer_has_no_place_for_is_named_before_anything_is_written(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a.pt", note={"seen": 5}, rng=[1, 2])
    with pytest.raises(LossError) as caught:
        ckptkit.convert(source, tmp_path / "out", to="safetensors", dialect="hf-trainer")
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["note", "rng"]
    assert ckptkit.convert(source, tmp_path / "out", to="safetensors", dialect="hf-trainer", allow_drop=True).written


def test_folders_of_others(tmp_path: Path) -> None:
    assert hf_trainer.find(tmp_path) is None
    (tmp_path / "trainer_state.json").write_text("{}")
    assert hf_trainer.find(tmp_path) is None
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert set(hf_trainer.find(tmp_path) or {}) == {"model", "trainer_state"}
