"""The restricted unpickler: nothing in a pickle is imported, called or changed; bombs are errors."""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.tree import Opaque
from ckptkit.errors import SourceError, UnsafePickleError
from ckptkit.io import globals as allow_list
from ckptkit.io.opcodes import end_of, one_pickle
from ckptkit.io.torch_file import load_tree
from ckptkit.io.unpickle import as_tree, unpickle

from .crafted import INERT, REFUSED, dump
from .files import others, same


def read(data: bytes) -> Any:
    return as_tree(unpickle(data, "crafted"), lambda stub: stub)


def table() -> list[tuple[Any, Any]]:
    """The allow-list with what its members hold."""
    return [(key, repr(value) if isinstance(value, allow_list.StorageType) else value)
            for key, value in allow_list._TABLE.items()]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_only_run_something_is_refused_by_name(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for protocol in (2, 4):
        with pytest.raises(UnsafePickleError) as caught:
            read(dump(REFUSED[name](canary), protocol))
        assert "run something" in caught.value.what and caught.value.why and caught.value.hint
    assert not canary.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "INST", "OBJ", "at protocol 0"])
def test_the_canary_sings_where_pickle_itself_reads(name: str, tmp_path: Path) -> None:
    """The control: these pickles do what they are meant to do."""
    canary = tmp_path / "canary"
    pickle.loads(dump(REFUSED[name](canary)))
    assert canary.exists()


@pytest.mark.parametrize("name", INERT)
def test_what_is_not_refused_by_name_does_nothing(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    modules, before, began = set(sys.modules), table(), time.monotonic()
    try:
        found = read(dump(INERT[name](canary)))
    except UnsafePickleError:
        raise
    except SourceError as error:
        assert error.why and error.hint
    else:
        _only_data(found)
    assert not canary.exists() and set(sys.modules) == modules and table() == before
    assert not copyreg._extension_registry  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5
    assert OrderedDict(a=1)["a"] == 1 and torch.float32.itemsize == 4


def _only_data(tree: Any) -> None:
    """A tree of plain values and names of classes."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            _only_data(key)
            _only_data(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _only_data(value)
    else:
        assert tree is None or isinstance(tree, bool | int | float | str | bytes | Opaque | torch.dtype), type(tree)


def test_a_storage_cannot_be_pointed_at_another_file(tmp_path: Path) -> None:
    """BUILD on the storage that a persistent id made: its path and offset are not the pickle's to choose."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 64)
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(4)}, path)
    import zipfile

    from .crafted import text

    pid = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
    state = b"](" + text("0") + text("float32") + b"K\x10" + text(str(secret)) + b"K\x00eb"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + state + b"K\x00(K\x04t(K\x01t\x89)RtR"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "evil.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, dump(tensor) if info.filename.endswith("data.pkl") else old.read(info))
    with pytest.raises(SourceError):
        load_tree(tmp_path / "evil.pt")


def test_the_extension_registry_is_never_asked(tmp_path: Path) -> None:
    """A program may have registered something and used it: its cache would be asked before any allow-list."""
    copyreg.add_extension("os", "getcwd", 77)
    try:
        assert pickle.loads(b"\x80\x02\x82\x4d.") is __import__("os").getcwd  # now it is in the cache
        with pytest.raises(SourceError, match="cannot be read"):
            read(b"\x80\x02\x82\x4d.")
    finally:
        copyreg.remove_extension("os", "getcwd", 77)
        copyreg.clear_extension_cache()


class Enum:  # the class is not imported: only its pickled form matters
    def __init__(self, value: int) -> None:
        self.value = value


def test_objects_as_keys_and_in_sets_do_not_reach_the_tree() -> None:
    data = pickle.dumps({"by object": {Enum(1): 2}, "set": {Enum(1)}, "kept": {(1, "a"): 2}})
    found = read(data)
    assert found["kept"] == {(1, "a"): 2}
    assert isinstance(found["by object"], Opaque) and "Enum" in found["by object"].kind
    assert isinstance(found["set"], Opaque)


def test_old_protocols_name_the_class_of_an_object() -> None:
    assert read(pickle.dumps(Enum(3), 0)) == Opaque(f"{__name__}.Enum") == read(pickle.dumps(Enum(3), 4))


def test_a_deep_tree_is_read_and_a_deeper_one_is_an_error() -> None:
    def nested(depth: int) -> bytes:
        return dump(b"]" * depth + b"a" * (depth - 1))

    assert read(nested(100))
    with pytest.raises(SourceError, match="cannot be carried"):
        read(nested(101))


def test_shared_containers_are_no_fault() -> None:
    shared = [1, 2]
    assert read(pickle.dumps([shared] * 1000)) == [shared] * 1000


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_random_bytes(data: bytes) -> None:
    with contextlib.suppress(SourceError):
        read(b"\x80\x04" + data + b".")


_PLAIN = {name: value for name, value in others().items() if name != "dict subclass"}
_SEED = pickle.dumps(_PLAIN, 4)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(_SEED) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(_SEED)
    for at, value in changes:
        data[at] = value
    with contextlib.suppress(SourceError):
        read(bytes(data))


@pytest.mark.parametrize("protocol", range(6))
def test_the_end_of_a_pickle_is_found_without_reading_it(protocol: int) -> None:
    data = pickle.dumps(_PLAIN, protocol)
    assert end_of(data + b"more") == len(data)
    file = io.BytesIO(b"before" + data + b"after")
    file.seek(6)
    assert one_pickle(file) == data and file.read() == b"after"
    for cut in range(0, len(data), 7):
        with pytest.raises((EOFError, ValueError)):
            end_of(data[:cut])
    assert same(read(data), _PLAIN)
