"""json: a part of folders only; trees that JSON cannot say are marked or named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.options import ReadOptions
from ckptkit.core.transform import same_value
from ckptkit.errors import SourceError
from ckptkit.formats import json_file, targets
from ckptkit.formats._json_tree import decoded, said, unsaid

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.just("ckptkit")
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(trees)
def test_trees_come_back(tree: object) -> None:
    assert list(unsaid("x", tree)) == []
    back = decoded(json.loads(json.dumps(said(tree, {}, "x"))), {})
    assert same_value(back, tree) and type(back) is type(tree)


def test_arrays_and_dtypes() -> None:
    tree = {"a": np.arange(6, dtype=np.uint32).reshape(2, 3), "d": torch.bfloat16, "e": np.empty((0, 2), np.float32)}
    back = decoded(json.loads(json.dumps(said(tree, {}, "x"))), {})
    assert np.array_equal(back["a"], tree["a"]) and back["a"].dtype == np.uint32 and back["d"] is torch.bfloat16
    assert back["e"].shape == (0, 2)


def test_what_cannot_be_said_is_named() -> None:
    tree = {"set": {1}, "deep": [1, {"c": 1j}], "key": {1j: 1, "kept": 2}}
    assert [drop.what for drop in unsaid("x", tree)] == ["x.set", "x.deep.1.c", "x.key.1j"]
    assert decoded(json.loads(json.dumps(said(tree, {}, "x"))), {}) == {"deep": [1, {}], "key": {"kept": 2}}


def test_it_is_no_target_and_never_found(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    assert "json" not in targets() and json_file.detect(tmp_path / "a.json") is None
    with pytest.raises(SourceError):
        json_file.read(tmp_path / "a.json", ReadOptions())
