"""dcp: what torch wrote is read whole or refused, and what is written here torch loads and trains on from."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.options import ReadOptions, WriteOptions
from ckptkit.errors import SourceError, UnsafePickleError
from ckptkit.formats import dcp
from ckptkit.opened import read_tensor

from ..truth import DEFAULT_MODEL, differences, truth_of

Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A small directory that torch wrote, and what it holds."""
    import torch.distributed.checkpoint as torch_dcp

    content: dict[str, Any] = {
        "model": {"w": torch.arange(12.0).reshape(4, 3), "scalar": torch.tensor(3.25), "flags": torch.tensor([True])},
        "step": 7,
        "notes": {"pair": (1, torch.arange(3)), "list": [{"a": 1}, {"b": torch.ones(2, dtype=torch.bfloat16)}]},
    }
    path = tmp_path_factory.mktemp("dcp") / "ckpt"
    torch_dcp.save(content, checkpoint_id=path)
    return path, content


@pytest.fixture
def copy(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    shutil.copytree(saved[0], tmp_path / "ckpt")
    return tmp_path / "ckpt"


def _change(path: Path, change: Callable[[Any], None]) -> None:
    """Rewrites `.metadata` after `change(metadata)`."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _entry(metadata: Any, key: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def test_reads_what_torch_wrote(saved: tuple[Path, dict[str, Any]]) -> None:
    path, content = saved
    tree = dcp.read(path, ReadOptions()).tree
    assert list(tree) == ["model", "step", "notes"] and tree["step"] == 7
    for name, tensor in content["model"].items():
        read = read_tensor(tree["model"][name])
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    number, tensor = tree["notes"]["pair"]
    assert number == 1 and read_tensor(tensor).tolist() == [0, 1, 2]
    assert tree["notes"]["list"][0] == {"a": 1}
    assert read_tensor(tree["notes"]["list"][1]["b"]).tolist() == [1.0, 1.0]


def test_opening_reads_no_entry_of_a_tensor(
    saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptkit.formats import _dcp_entries, _dcp_read

    opened: list[int] = []
    real = _dcp_entries.load_entry

    def counting(root: Path, entry: Any) -> Any:
        opened.append(entry.offset)
        return real(root, entry)

    for module in (_dcp_entries, _dcp_read):
        monkeypatch.setattr(module, "load_entry", counting)
    tree = dcp.read(saved[0], ReadOptions()).tree
    objects = len(opened)
    assert objects == 3  # step, pair, a
    read_tensor(tree["model"]["w"])
    read_tensor(tree["model"]["w"])
    assert len(opened) == objects + 1


@pytest.mark.parametrize("name", ["fsdp2-dcp-ws3", "fsdp1-hybrid-dcp-ws4", "fsdp2-dcp-flat", "fsdp2-hf-consolidated"])
def test_reads_runs_as_they_were(name: str, fixture_dir: Build) -> None:
    truth = truth_of(fixture_dir(name))
    checkpoint = ckptkit.open(truth.path, model=truth.model)
    found = differences(checkpoint, truth)
    if "hf" in name:
        # The fixture holds what HuggingFaceStorageWriter can hold: neither 0-d nor integer nor bool tensors.
        found = [each for each in found if not each.startswith("missing")]
        assert checkpoint.entries
    assert found == []


def test_reads_two_dimensional_meshes(pool: Any, tmp_path: Path) -> None:
    truth = pool.run("tests.formats.torch_jobs:save_on_a_grid", world_size=4, path=str(tmp_path))[0]
    tree = dcp.read(tmp_path / "dcp", ReadOptions()).tree["model"]
    assert {name: read_tensor(tensor).tolist() for name, tensor in tree.items()} == {
        name: tensor.tolist() for name, tensor in truth.items()
    }
    assert len(tree["both"].pieces) == 4 and len(tree["replica"].pieces) == 2


def test_reads_saves_without_collectives(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    truth = pool.run("tests.formats.torch_jobs:save_without_collectives", world_size=3, path=str(path))[0]
    assert not (path / ".metadata").exists()
    contents = dcp.read(path, ReadOptions())
    assert contents.world_size == 3
    for name, tensor in truth.items():
        assert torch.equal(read_tensor(contents.tree["model"][name]), tensor)
    assert contents.tree["step"] == 4
    assert contents.tree["seed"] == {"rank_0": 10, "rank_1": 11, "rank_2": 12}
    (path / "__1.metadata").unlink()
    with pytest.raises(SourceError, match="lacks the metadata of 1 ranks") as caught:
        dcp.read(path, ReadOptions())
    assert caught.value.faults == ("__1.metadata is missing",)
    (path / "__2.metadata").unlink()  # the last ranks' names are missed by nothing but the elements
    with pytest.raises(SourceError) as caught:
        dcp.read(path, ReadOptions())
    assert any("model.w" in fault and "in no chunk" in fault for fault in caught.value.faults)


def test_reads_compressed_entries(pool: Any, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    truth = pool.run("tests.formats.torch_jobs:save_compressed", world_size=1, path=str(tmp_path / "ckpt"))[0]
    tree = dcp.read(tmp_path / "ckpt", ReadOptions()).tree
    assert tree["step"] == 4
    for name, tensor in truth.items():
        assert torch.equal(read_tensor(tree["model"][name]), tensor)
    _change(tmp_path / "ckpt", lambda m: setattr(_entry(m, "model.w"), "transform_descriptors", ["stream.lz9/1"]))
    with pytest.raises(SourceError, match="transform that is not known"):
        read_tensor(dcp.read(tmp_path / "ckpt", ReadOptions()).tree["model"]["w"])


class _Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def test_a_crafted_metadata_runs_nothing(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    _change(copy, lambda metadata: setattr(metadata, "planner_data", _Attack()))
    with pytest.raises(UnsafePickleError, match="system"):
        dcp.read(copy, ReadOptions())
    assert not (copy / "attacked").exists()
    pickle.loads((copy / ".metadata").read_bytes())  # the control: the crafted file is live
    assert (copy / "attacked").exists()


def test_a_crafted_object_runs_nothing(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    torch.save(_Attack(), copy / "__9_0.distcp")

    def point(metadata: Any) -> None:
        entry = _entry(metadata, "step")
        entry.relative_path, entry.offset, entry.length = "__9_0.distcp", 0, (copy / "__9_0.distcp").stat().st_size

    _change(copy, point)
    with pytest.raises(UnsafePickleError, match="system"):
        dcp.read(copy, ReadOptions())
    assert not (copy / "attacked").exists()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: setattr(_entry(m, "model.w"), "relative_path", "../other.distcp"), "outside of the checkpoint"),
        (lambda m: setattr(_entry(m, "model.w"), "relative_path", "/etc/passwd"), "outside of the checkpoint"),
        (lambda m: setattr(_entry(m, "model.w"), "relative_path", "__7_0.distcp"), "__7_0.distcp is missing"),
        (lambda m: setattr(_entry(m, "model.w"), "offset", -4), "an entry at -4"),
        (lambda m: setattr(_entry(m, "model.w"), "offset", 1 << 40), "which has"),
        (lambda m: m.state_dict_metadata["model.w"].chunks.clear(), "12 of its 12 elements are in no chunk"),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([5, 3])), "3 of its 15 elements"),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([3, 3])), "outside of (3, 3)"),
        (lambda m: m.planner_data.update({"step": ("model", "w")}), "is another item's"),
        (lambda m: m.storage_data.clear(), "no file holds its"),
    ],
)  # fmt: skip
def test_damaged_metadata_is_refused_by_name(copy: Path, change: Callable[[Any], None], fault: str) -> None:
    dcp.read(copy, ReadOptions())
    _change(copy, change)
    with pytest.raises(SourceError) as caught:
        dcp.read(copy, ReadOptions())
    assert any(fault in each for each in caught.value.faults), caught.value


def test_overlapping_chunks_are_refused(copy: Path) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    def overlap(metadata: Any) -> None:
        chunk = ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([2, 3]))
        metadata.state_dict_metadata["model.w"].chunks.append(chunk)
        metadata.storage_data[MetadataIndex("model.w", chunk.offsets, 1)] = _entry(metadata, "model.w")

    _change(copy, overlap)
    with pytest.raises(SourceError) as caught:
        dcp.read(copy, ReadOptions())
    assert caught.value.faults == ("model.w: 6 elements are in two chunks, at (0, 0) and at (1, 0)",)


def test_a_truncated_file_and_a_missing_metadata_are_refused(copy: Path) -> None:
    file = next(copy.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SourceError) as caught:
        dcp.read(copy, ReadOptions())
    assert caught.value.faults
    (copy / ".metadata").unlink()
    assert dcp.detect(copy) == "1 .distcp files without .metadata"
    with pytest.raises(SourceError, match=r"has no \.metadata"):
        dcp.read(copy, ReadOptions())


def test_an_entry_of_another_tensor_is_refused_when_it_is_read(copy: Path) -> None:
    def swap(metadata: Any) -> None:
        one, other = _entry(metadata, "model.w"), _entry(metadata, "model.scalar")
        one.offset, one.length, other.offset, other.length = other.offset, other.length, one.offset, one.length

    _change(copy, swap)
    tree = dcp.read(copy, ReadOptions()).tree
    with pytest.raises(SourceError, match=r"is not the chunk of model\.w"):
        read_tensor(tree["model"]["w"])


def test_shards_inside_objects_are_refused(tmp_path: Path, pool: Any) -> None:
    """What torch 1.13 did with nested state dicts: one rank's shards, pickled as an object."""
    import torch.distributed.checkpoint as torch_dcp

    pool.run("tests.formats.torch_jobs:save_on_a_grid", world_size=4, path=str(tmp_path))
    inside = torch.load(tmp_path / "ranks" / "grid_rank_0.pt", weights_only=False)
    torch_dcp.save({"model": (inside["model"],)}, checkpoint_id=tmp_path / "nested")
    with pytest.raises(SourceError, match="those of one rank only") as caught:
        dcp.read(tmp_path / "nested", ReadOptions())
    assert len(caught.value.faults) == 4


def test_a_lost_shard_of_the_safetensors_storage_is_refused(fixture_dir: Build, tmp_path: Path) -> None:
    shutil.copytree(truth_of(fixture_dir("fsdp2-hf-consolidated")).path, tmp_path / "ckpt")
    next((tmp_path / "ckpt" / "sharded").glob("shard-00002-*")).unlink()
    with pytest.raises(SourceError) as caught:
        dcp.read(tmp_path / "ckpt", ReadOptions())
    assert any("in no chunk" in fault for fault in caught.value.faults)


RESUMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fsdp2": ("fsdp2", "nested", {}),
    "fsdp2-flat": ("fsdp2", "flat", {"flat_optimizer": True}),
    "fsdp1": ("fsdp1", "nested", {}),
    "fsdp1-sharded": ("fsdp1", "sharded-dcp", {}),
    "ddp": ("ddp", "nested", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", RESUMES)
@pytest.mark.parametrize("source", ["ddp-full", "fsdp1-local"])
def test_torch_trains_on_from_what_is_written(
    source: str, target: str, fixture_dir: Build, tmp_path: Path, pool: Any
) -> None:
    """At another world size, with the losses of the run that was never interrupted."""
    folder = fixture_dir(source)
    truth = truth_of(folder)
    strategy, form, options = RESUMES[target]
    out = tmp_path / "out"
    ckptkit.convert(truth.path, out, to="dcp", world_size=2, model=DEFAULT_MODEL, allow_drop=True, **options)
    job = {"strategy": strategy, "path": str(out), "form": form}
    resumed = pool.run("tests.formats.torch_jobs:resume", world_size=3, **job)[0]
    for key, tensor in truth.tensors.items():
        assert torch.equal(resumed.state.tensors[key], tensor), key
    expected = json.loads((folder / "continue.json").read_text())["losses"]
    assert resumed.losses == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.slow
def test_a_swapped_shard_is_seen(fixture_dir: Build, tmp_path: Path) -> None:
    truth = truth_of(fixture_dir("fsdp2-dcp"))
    shutil.copytree(truth.path, tmp_path / "ckpt")

    def swap(metadata: Any) -> None:
        one, other = (
            next(
                i
                for x, i in metadata.storage_data.items()
                if x.fqn == f"model.blocks.{n}.query.weight" and x.index == 0
            )
            for n in (0, 1)
        )
        one.offset, other.offset = other.offset, one.offset
        one.relative_path, other.relative_path = other.relative_path, one.relative_path

    assert differences(ckptkit.open(tmp_path / "ckpt", model=truth.model), truth) == []
    _change(tmp_path / "ckpt", swap)
    found = differences(ckptkit.open(tmp_path / "ckpt", model=truth.model), truth)
    assert found == [f"blocks.{n}.query.weight[value]: values differ" for n in (0, 1)]


def test_writing_puts_metadata_last_and_a_file_for_each_rank(saved: tuple[Path, dict[str, Any]]) -> None:
    contents = dcp.read(saved[0], ReadOptions())
    names = [file.name for file in dcp.layout(contents, WriteOptions("dcp", world_size=3)).files]
    assert names == ["__0_0.distcp", "__1_0.distcp", ".metadata"]  # 4 rows over 3 ranks: 2 + 2, by torch.chunk
