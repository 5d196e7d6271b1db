"""rank_files: every rank's file read into one checkpoint or refused, and files that FSDP's own loaders take."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.assemble import Hints
from ckptkit.core.disassemble import disassemble
from ckptkit.core.execute import execute
from ckptkit.core.options import ReadOptions, WriteOptions
from ckptkit.dialects import plain
from ckptkit.errors import SourceError, UnsafePickleError
from ckptkit.formats import rank_files
from ckptkit.io.model import describe
from ckptkit.io.move import move
from ckptkit.io.stage import staged
from ckptkit.opened import OpenCheckpoint, read_tensor

from ..truth import DEFAULT_MODEL, differences, truth_of

Build = Callable[[str], Path]
pytestmark = pytest.mark.slow


def _copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(truth_of(folder).path, tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.mark.parametrize(
    "name",
    ["fsdp1-ranks-ws3", "fsdp1-ranks-mesh", "fsdp1-local-ws3", "fsdp1-local-flatparam", "fsdp2-ranks-ws3"],
)
def test_reads_runs_as_they_were(name: str, fixture_dir: Build) -> None:
    truth = truth_of(fixture_dir(name))
    checkpoint = ckptkit.open(truth.path, model=truth.model)
    assert differences(checkpoint, truth) == []
    assert checkpoint.world_size == truth.info["world_size"]
    assert checkpoint.step == truth.info["step"]
    one = next(iter(sorted(truth.path.glob("*model*rank*.pt" if "fsdp2" in name else "*rank*.pt"))))
    assert ckptkit.open(one, model=truth.model).tensors.keys() <= checkpoint.tensors.keys()


def test_reads_two_dimensional_meshes(pool: Any, tmp_path: Path) -> None:
    truth = pool.run("tests.formats.torch_jobs:save_on_a_grid", world_size=4, path=str(tmp_path))[0]
    contents = rank_files.read(tmp_path / "ranks", ReadOptions())
    assert contents.world_size == 4
    for name, tensor in truth.items():
        assert torch.equal(read_tensor(contents.tree["model"][name]), tensor), name


def test_reads_files_whose_names_say_nothing(pool: Any, tmp_path: Path) -> None:
    truth = pool.run("tests.formats.torch_jobs:save_on_a_grid", world_size=4, path=str(tmp_path))[0]
    for rank, letter in enumerate("dbca"):
        (tmp_path / "ranks" / f"grid_rank_{rank}.pt").rename(tmp_path / "ranks" / f"{letter}.pt")
    assert rank_files.detect(tmp_path / "ranks") is None
    tree = rank_files.read(tmp_path / "ranks", ReadOptions()).tree
    for name, tensor in truth.items():
        assert torch.equal(read_tensor(tree["model"][name]), tensor), name


def test_every_missing_rank_is_named(pool: Any, tmp_path: Path) -> None:
    pool.run("tests.formats.torch_jobs:save_on_a_grid", world_size=4, path=str(tmp_path))
    for rank in (1, 3):
        (tmp_path / "ranks" / f"grid_rank_{rank}.pt").unlink()
    with pytest.raises(SourceError, match="all 4 ranks") as caught:
        rank_files.read(tmp_path / "ranks", ReadOptions())
    assert caught.value.faults == tuple(f"rank {rank} of grid_rank_0.pt is missing" for rank in (1, 3))


def test_a_file_of_another_rank_is_refused(fixture_dir: Build, tmp_path: Path) -> None:
    path = _copy(fixture_dir("fsdp1-ranks"), tmp_path)
    one, other = path / "checkpoint_rank_0.pt", path / "checkpoint_rank_1.pt"
    one.rename(path / "aside")
    other.rename(one)
    (path / "aside").rename(other)
    with pytest.raises(SourceError) as caught:
        rank_files.read(path, ReadOptions())
    assert set(caught.value.faults) == {
        "checkpoint_rank_0.pt holds the shards of rank 1",
        "checkpoint_rank_1.pt holds the shards of rank 0",
    }


def test_files_of_another_world_size_are_refused(fixture_dir: Build, tmp_path: Path) -> None:
    path = _copy(fixture_dir("fsdp1-ranks"), tmp_path)
    shutil.copy(truth_of(fixture_dir("fsdp1-ranks-ws3")).path / "checkpoint_rank_1.pt", path)
    with pytest.raises(SourceError) as caught:
        rank_files.read(path, ReadOptions())
    assert any("the world size is 3 by the tensors in checkpoint_rank_1.pt" in fault for fault in caught.value.faults)


def test_files_of_another_step_are_refused(fixture_dir: Build, tmp_path: Path) -> None:
    path = _copy(fixture_dir("fsdp2-ranks"), tmp_path)
    file = path / "optim_world_size_2_rank_1.pt"
    optimizer = torch.load(file, weights_only=False)
    for slots in optimizer["state"].values():
        slots["step"] += 1
    torch.save(optimizer, file)
    with pytest.raises(SourceError) as caught:
        rank_files.read(path, ReadOptions())
    assert "optimizer.state.0.step: 3.0 on rank 0 and 4.0 on rank 1" in caught.value.faults


def test_groups_that_differ_are_refused(fixture_dir: Build, tmp_path: Path) -> None:
    path = _copy(fixture_dir("fsdp2-ranks"), tmp_path)
    file = path / "optim_world_size_2_rank_1.pt"
    optimizer = torch.load(file, weights_only=False)
    optimizer["param_groups"][1]["weight_decay"] = 0.5
    torch.save(optimizer, file)
    with pytest.raises(SourceError) as caught:
        rank_files.read(path, ReadOptions())
    assert caught.value.faults == ("optimizer.param_groups.1.weight_decay: 0.0 on rank 0 and 0.5 on rank 1",)


@pytest.mark.parametrize("name", ["fsdp1-local", "fsdp1-local-flatparam"])
def test_flat_parameters_need_the_model_and_must_fit_it(name: str, fixture_dir: Build) -> None:
    path = truth_of(fixture_dir(name)).path
    with pytest.raises(SourceError, match="without the shapes") as caught:
        rank_files.read(path, ReadOptions())
    assert "--model" in caught.value.hint and any("_flat_param: " in fault for fault in caught.value.faults)
    facts = describe("fixtures.models:scalar_model")  # one parameter more
    with pytest.raises(SourceError, match="do not fit the model") as caught:
        rank_files.read(path, ReadOptions(Hints(model=facts)))
    assert any(fault.startswith("_flat_param: ") for fault in caught.value.faults)


def test_what_each_rank_has_for_itself_is_kept(fixture_dir: Build, tmp_path: Path) -> None:
    path = _copy(fixture_dir("fsdp1-ranks"), tmp_path)
    assert rank_files.read(path, ReadOptions()).tree["note"]["tags"] == ["a", "b"]  # equal on both: one value
    for rank in (0, 1):
        torch.save({"seed": torch.tensor([rank])}, path / f"seeds_rank_{rank}.pt")
    seed = rank_files.read(path, ReadOptions()).tree["seed"]
    assert {name: read_tensor(tensor).tolist() for name, tensor in seed.items()} == {"rank_0": [0], "rank_1": [1]}


class _Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def test_a_crafted_file_runs_nothing(fixture_dir: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _copy(fixture_dir("fsdp2-ranks"), tmp_path)
    monkeypatch.chdir(path)
    torch.save({"lr_scheduler": _Attack()}, path / "extra_state_world_size_2_rank_1.pt")
    with pytest.raises(UnsafePickleError, match="system"):
        rank_files.read(path, ReadOptions())
    assert not (path / "attacked").exists()


def test_a_truncated_file_is_refused(fixture_dir: Build, tmp_path: Path) -> None:
    path = _copy(fixture_dir("fsdp2-ranks"), tmp_path)
    file = path / "model_world_size_2_rank_1.pt"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SourceError, match="damaged"):
        rank_files.read(path, ReadOptions())


WRITTEN = {"fsdp2": ("verl", "cpu:shard"), "fsdp1": ("fsdp1-ranks", "cpu")}


def _write(checkpoint: OpenCheckpoint, out: Path, options: WriteOptions) -> None:
    contents = plain.write(disassemble(checkpoint), "rank_files")[""]
    with staged(out, is_file=False) as stage:
        execute(rank_files.layout(contents, options), stage.create, move)


@pytest.mark.parametrize("strategy", WRITTEN)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("source", ["ddp-full", "fsdp1-local"])
def test_torch_trains_on_from_what_is_written(
    source: str, strategy: str, world_size: int, fixture_dir: Build, tmp_path: Path, pool: Any
) -> None:
    folder = fixture_dir(source)
    truth = truth_of(folder)
    target, mesh = WRITTEN[strategy]
    checkpoint = ckptkit.open(truth.path, model=DEFAULT_MODEL)
    _write(checkpoint, tmp_path / "out", WriteOptions(target, world_size=world_size, mesh=mesh))
    job = {"strategy": strategy, "path": str(tmp_path / "out"), "form": "ranks"}
    resumed = pool.run("tests.formats.torch_jobs:resume", world_size=world_size, **job)[0]
    for key, tensor in truth.tensors.items():
        assert torch.equal(resumed.state.tensors[key], tensor), key
    expected = json.loads((folder / "continue.json").read_text())["losses"]
    assert resumed.losses == pytest.approx(expected, rel=1e-6, abs=0)
    names = [name for group in checkpoint.param_groups for name in group["params"]]
    assert differences(ckptkit.open(tmp_path / "out", param_names=names), truth) == []
