"""A crafted pickle in every place where a pickle occurs in a checkpoint: refused, nothing run, nothing imported."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.errors import SourceError, UnsafePickleError

from .io.crafted import INERT, REFUSED, dump
from .truth import truth_of

ATTACKS = ("os.system", "builtins.eval", "subprocess.Popen", "INST", "inside a stand-in's state")


def with_pickle(path: Path, data: bytes) -> None:
    """Replace the pickle of a torch file (zip: data.pkl, legacy: the object's), or the file itself if it is bare."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as old:
            records = [(info.filename, old.read(info)) for info in old.infolist()]
        with zipfile.ZipFile(path, "w") as new:
            for name, content in records:
                new.writestr(name, data if name.endswith("data.pkl") else content)
    else:
        path.write_bytes(data)


def read_all(path: Path, **options: object) -> None:
    """Open a checkpoint and read every tensor of it."""
    checkpoint = ckptkit.open(path, **options)  # type: ignore[arg-type]
    for key in checkpoint.entries:
        checkpoint.read(*key)


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """The file that every attack would make; no module may be imported either that the pickle names."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()
    assert not {"antigravity", "evil_module_on_no_machine", "my.mod"} & set(sys.modules)


def legacy(path: Path, attack: bytes) -> None:
    """A legacy torch file whose object is the attack."""
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    object_at = data.index(b"\x80\x02}", data.index(b"little_endian") + 20)
    path.write_bytes(data[:object_at] + attack + data[object_at:])


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("place", ["zip", "legacy object", "legacy first pickle", "legacy keys"])
def test_full(place: str, attack: str, tmp_path: Path, canary: Path) -> None:
    path, crafted = tmp_path / "a.pt", dump(REFUSED[attack](canary), 2)
    if place == "zip":
        torch.save({"model": {"w": torch.ones(2)}}, path)
        with_pickle(path, crafted)
    elif place == "legacy object":
        legacy(path, crafted)
    else:
        torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
        data = path.read_bytes()
        keys_at = data.rindex(b"\x80\x02]")
        path.write_bytes(crafted + data if place.endswith("pickle") else data[:keys_at] + crafted)
        if place.endswith("pickle"):
            with pytest.raises(SourceError):  # its first bytes are no torch file's any more
                read_all(path)
            with pytest.raises(UnsafePickleError):
                read_all(path, format="full")
            return
    with pytest.raises(UnsafePickleError) as caught:
        read_all(path)
    assert caught.value.code == 3


@pytest.mark.parametrize("name", INERT)
def test_what_is_inert_lets_the_tensors_beside_it_through_or_is_an_error(
    name: str, tmp_path: Path, canary: Path
) -> None:
    """The pickle is the file's own with the attack as one more value of the dict."""
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.arange(4)}}, path)
    with zipfile.ZipFile(path) as old:
        own = old.read("a/data.pkl")
    body = INERT[name](canary)
    with_pickle(path, own[:-1] + b"X\x05\x00\x00\x00extra" + body + b"s.")
    try:
        checkpoint = ckptkit.open(path)
    except UnsafePickleError:
        raise
    except SourceError:
        return
    assert torch.equal(checkpoint.read("w"), torch.arange(4))
    converted = ckptkit.convert(path, tmp_path / "out", to="full", allow_drop=True)
    assert converted.written
    torch.load(tmp_path / "out", weights_only=True)  # nothing of it has gone into what we write


def _swap(pattern: str) -> Callable[[Path], list[Path]]:
    return lambda root: sorted(root.glob(pattern))


PLACES: dict[tuple[str, str], Callable[[Path], list[Path]]] = {
    ("accelerate-ddp", "random states"): _swap("random_states_*.pkl"),
    ("accelerate-ddp", "optimizer"): _swap("optimizer.bin"),
    ("accelerate-ddp", "scheduler"): _swap("scheduler.bin"),
    ("accelerate-fsdp1-full", "model"): _swap("pytorch_model_fsdp.bin"),
    ("accelerate-fsdp2-sharded", "dcp metadata of a part"): _swap("*/.metadata"),
    ("hf-trainer", "optimizer"): _swap("optimizer.pt"),
    ("hf-trainer", "scheduler"): _swap("scheduler.pt"),
    ("hf-trainer", "random states"): _swap("rng_state.pth"),
    ("hf-pretrained-bin", "shard"): _swap("pytorch_model-00001*.bin"),
    ("fsdp2-dcp", "metadata"): _swap(".metadata"),
    ("fsdp1-ranks", "a rank"): _swap("*1*"),
    ("fsdp2-ranks", "a rank"): _swap("*rank_1*"),
    ("fsdp1-local", "a rank"): _swap("*1*"),
    ("zero2", "model"): _swap("*/mp_rank_00_model_states.pt"),
    ("zero2", "optimizer"): _swap("*/*zero_pp_rank_1*optim_states.pt"),
    ("zero3", "model"): _swap("*/zero_pp_rank_0*model_states.pt"),
    ("zero3", "optimizer"): _swap("*/*zero_pp_rank_0*optim_states.pt"),
    ("universal-zero1", "a moment"): _swap("*/zero/*/exp_avg.pt"),
    ("universal-zero1", "optimizer"): _swap("*/zero/optimizer_state.pt"),
    ("universal-zero3", "a master"): _swap("*/zero/*/fp32.pt"),
    ("universal-zero3", "model"): _swap("*/*model_states.pt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["os.system", "builtins.eval"])
@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_places_of_real_checkpoints(
    place: tuple[str, str], attack: str, fixture_dir: Callable[[str], Path], tmp_path: Path, canary: Path
) -> None:
    """Each crafted pickle stands in one file of a checkpoint that a real framework wrote."""
    truth = truth_of(fixture_dir(place[0]))
    copy = tmp_path / "copy"
    (shutil.copytree if truth.path.is_dir() else shutil.copy)(truth.path, copy)
    options = {} if place[0].startswith("hf") else {"model": truth.model}
    read_all(copy, **options)  # the control: it is readable before
    files = PLACES[place](copy)
    assert files, sorted(os.listdir(copy))
    with_pickle(files[0], dump(REFUSED[attack](canary), 2))
    with pytest.raises(UnsafePickleError):
        read_all(copy, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "tensor"])
def test_entries_of_dcp(kind: str, fixture_dir: Callable[[str], Path], tmp_path: Path, canary: Path) -> None:
    """The entries of a .distcp file are torch files back to back: one is overwritten in its place."""
    from ckptkit.formats._dcp_metadata import read_index

    truth = truth_of(fixture_dir("fsdp2-dcp"))
    copy = tmp_path / "copy"
    shutil.copytree(truth.path, copy)
    index = read_index(copy / ".metadata")
    wanted = {key for key, item in index.items.items() if (not item.dtype) == (kind == "bytes")}
    entry = next(entry for (key, _), entry in index.entries.items() if key in wanted)
    part = tmp_path / "entry.pt"
    data = bytearray((copy / entry.file).read_bytes())
    part.write_bytes(bytes(data[entry.offset : entry.offset + entry.length]))
    with_pickle(part, dump(REFUSED["os.system"](canary), 2))
    crafted = part.read_bytes()
    assert len(crafted) <= entry.length
    # A zip is found from its end: the crafted archive's comment is padded to the entry's length.
    padding = entry.length - len(crafted)
    crafted = crafted[:-2] + padding.to_bytes(2, "little") + bytes(padding)
    data[entry.offset : entry.offset + entry.length] = crafted
    (copy / entry.file).write_bytes(bytes(data))
    with pytest.raises(UnsafePickleError):
        read_all(copy, model=truth.model)
