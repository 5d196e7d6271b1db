"""accelerate: folders that it wrote are read, and what is written for it loads in `Accelerator.load_state`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.dialects import accelerate
from ckptkit.errors import SourceError, UsageError
from tests.cli.run import checkpoint
from tests.truth import differences, truth_of

from .resumes import continued, resumed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["accelerate-plain", "accelerate-ddp", "accelerate-fsdp1-sharded", "accelerate-fsdp1-full",
             "accelerate-fsdp2-sharded", "accelerate-fsdp2-full"],
)  # fmt: skip
def test_what_accelerate_wrote_is_read(name: str, fixture_dir: Callable[[str], Path]) -> None:
    truth = truth_of(fixture_dir(name))
    opened = ckptkit.open(truth.path, model=truth.model)
    assert opened.dialect == "accelerate" and differences(opened, truth) == []
    assert set(opened.extras["random_states"]) == set(range(truth.info["world_size"]))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("to", "like"), [("dcp", "accelerate-fsdp2-sharded"), ("full", "accelerate-fsdp2-full"),
                     ("safetensors", "accelerate-ddp")],
)  # fmt: skip
def test_load_state_goes_on_from_what_is_written(
    to: str, like: str, world_size: int, fixture_dir: Callable[[str], Path], tmp_path: Path, pool: Any
) -> None:
    """From a DDP loop's file to accelerate's folder: the losses are those of the run that was never interrupted."""
    source = fixture_dir("ddp-full")
    truth = truth_of(source)
    ckptkit.convert(truth.path, tmp_path / "ckpt", to=to, dialect="accelerate", model=truth.model)
    assert resumed(pool, like, tmp_path, world_size) == pytest.approx(continued(source), rel=1e-6)


@pytest.mark.slow
def test_the_comparison_sees_an_optimizer_that_starts_anew(
    fixture_dir: Callable[[str], Path], tmp_path: Path, pool: Any
) -> None:
    """The control: the same folder with empty moments."""
    source = fixture_dir("ddp-full")
    truth = truth_of(source)
    ckptkit.convert(truth.path, tmp_path / "ckpt", to="full", dialect="accelerate", model=truth.model)
    optimizer = torch.load(tmp_path / "ckpt" / "optimizer.bin")
    for slots in optimizer["state"].values():
        for tensor in slots.values():
            tensor.zero_()
    torch.save(optimizer, tmp_path / "ckpt" / "optimizer.bin")
    losses = resumed(pool, "accelerate-fsdp2-full", tmp_path, 2)
    assert losses[-1] != pytest.approx(continued(source)[-1], rel=1e-4)


@pytest.mark.parametrize("to", ["dcp", "full", "safetensors"])
def test_foreign_extras_come_back(to: str, tmp_path: Path) -> None:
    """A plain loop's step and notes have no file of their own in accelerate's folder."""
    source = checkpoint(tmp_path / "a.pt", note={"seen": 5})
    names = ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias"]
    ckptkit.convert(source, tmp_path / "out", to=to, dialect="accelerate")
    assert accelerate.find(tmp_path / "out")
    back = ckptkit.open(tmp_path / "out", param_names=names)
    assert (back.dialect, back.step, back.extras["note"]) == ("accelerate", 3, {"seen": 5})
    assert "custom_checkpoint" not in back.extras and back.extras["scheduler"]["last_epoch"] == 3
    assert ckptkit.diff(source, back).equal


def test_it_writes_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        ckptkit.convert(checkpoint(tmp_path / "a.pt"), tmp_path / "o", to="zero2", dialect="accelerate")


def test_folders_of_others_and_of_several_models(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert accelerate.find(tmp_path) is None
    (tmp_path / "scheduler.bin").touch()
    assert accelerate.find(tmp_path)
    (tmp_path / "model_1.safetensors").touch()
    with pytest.raises(SourceError, match="several models"):
        accelerate.find(tmp_path)
    (tmp_path / "trainer_state.json").touch()
    assert accelerate.find(tmp_path) is None
