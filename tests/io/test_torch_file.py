"""Torch files that torch wrote read as torch reads them: zip and legacy, every dtype, view, tie and container."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.core.tree import Opaque
from ckptkit.errors import SourceError
from ckptkit.io.torch_file import is_torch_file, load_raw, load_tree, load_tree_of_bytes

from .files import others, plain, read, same, tensors, unknown, values

KINDS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def saved(path: Path, content: Any, zipped: bool, protocol: int = 2) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return path


@KINDS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_equal_what_torch_loads(tmp_path: Path, zipped: bool, protocol: int) -> None:
    content = {"tensors": tensors(zipped), **others()}
    path = saved(tmp_path / "a.pt", content, zipped, protocol)
    loaded = torch.load(path, weights_only=False)
    found = read(path)
    assert list(found) == list(loaded)
    wrong = [name for name, tensor in loaded["tensors"].items() if not same(found["tensors"][name], tensor)]
    wrong += [name for name in loaded if name != "tensors" and not same(found[name], loaded[name])]
    assert wrong == []


@KINDS
def test_the_comparison_would_see_one_wrong_element(tmp_path: Path, zipped: bool) -> None:
    content = tensors(zipped)
    path = saved(tmp_path / "a.pt", content, zipped)
    content["transposed"][3, 2] += 1
    assert not same(read(path)["transposed"], content["transposed"])


@KINDS
def test_tied_tensors_have_one_storage_and_others_have_not(tmp_path: Path, zipped: bool) -> None:
    base = torch.randn(4, 4)
    content = {"a": base, "b": base.view(4, 4), "part": base[1:], "turned": base.t(), "copy": base.clone()}
    tree = load_tree(saved(tmp_path / "a.pt", content, zipped))
    assert tree["a"].storage == tree["b"].storage is not None
    assert len({tree[name].storage for name in content}) == 4


@KINDS
def test_unknown_objects_are_named_and_the_rest_is_read(tmp_path: Path, zipped: bool) -> None:
    tree = load_tree(saved(tmp_path / "a.pt", {"w": torch.ones(2), **unknown()}, zipped))
    assert tree["args"] == tree["type"] == Opaque("argparse.Namespace")
    assert tree["device"] == "cpu"
    assert same(plain(tree["w"]), torch.ones(2))


@KINDS
def test_a_torch_file_inside_another_file(tmp_path: Path, zipped: bool) -> None:
    one, other = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1000), one, _use_new_zipfile_serialization=zipped)
    torch.save({"w": values(torch.float32, 5, 3).t()}, other, _use_new_zipfile_serialization=zipped)
    path = tmp_path / "both"
    path.write_bytes(one.getvalue() + other.getvalue() + one.getvalue())
    start, size = len(one.getvalue()), len(other.getvalue())
    found = plain(load_tree(path, start, size))
    assert same(found["w"], values(torch.float32, 5, 3).t())
    assert same(plain(load_tree_of_bytes(other.getvalue(), "memory"))["w"], values(torch.float32, 5, 3).t())
    for where in ((start, size + len(one.getvalue()) + 1), (-1, 10), (start + 1, size)):
        with pytest.raises(SourceError):
            load_tree(path, *where)


def test_detection_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptkit.io import unpickle

    def fail(*args: Any) -> None:
        raise AssertionError("detection must not unpickle")

    paths = [saved(tmp_path / f"{zipped}.pt", {"w": torch.ones(1)}, zipped) for zipped in (True, False)]
    monkeypatch.setattr(unpickle, "_Restricted", fail)
    assert all(map(is_torch_file, paths))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "plain pickle").write_bytes(b"\x80\x02}q\x00.")
    assert not any(is_torch_file(tmp_path / name) for name in ("empty", "text", "plain pickle", "absent", "."))


def test_torchscript_and_big_endian_and_other_zips_are_refused_by_name(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "script.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    with pytest.raises(SourceError, match="TorchScript"):
        load_raw(path)
    saved(tmp_path / "a.pt", {"w": torch.ones(2)}, True)
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "big.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, b"big" if info.filename.endswith("byteorder") else old.read(info))
    with pytest.raises(SourceError, match="big-endian"):
        load_raw(tmp_path / "big.pt")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as new:
        new.writestr("hello", b"x")
    with pytest.raises(SourceError, match="no torch file"):
        load_raw(tmp_path / "other.zip")


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    """Readers differ in which of the two they take."""
    import zipfile

    path = saved(tmp_path / "a.pt", {"w": torch.ones(2)}, True)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"\x80\x02}.")
    with pytest.raises(SourceError, match="damaged"):
        load_raw(path)


@pytest.mark.parametrize("content", [b"", b"\x80", b"\x80\x02", b"PK\x03\x04", b"hello world"])
def test_what_is_no_torch_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        load_raw(path)
    assert caught.value.why and caught.value.hint
