"""deepspeed: the keys that the containers zero and universal give, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.core.checkpoint import Contents
from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor
from ckptkit.dialects import deepspeed
from ckptkit.errors import UsageError

T = Tensor.at(Constant(b""), (2,), "float32")
TREE: dict[str, Any] = {
    "model": {"w": T}, "optimizer": {"state": {"w": {"exp_avg": T}}, "param_groups": [{"params": ["w"]}]},
    "master": {"w": T}, "scheduler": {"last_epoch": 1}, "step": 3,
}  # fmt: skip


def test_it_claims_its_containers_alone() -> None:
    for format in ("zero", "universal"):
        assert deepspeed.claims(Contents(format, TREE, "files of DeepSpeed")) == "files of DeepSpeed"
    for format in ("full", "dcp", "safetensors", "rank_files"):
        assert deepspeed.claims(Contents(format, TREE, "")) is None


def test_read_and_write_are_mirrors() -> None:
    facts = {"aliases": {"v": "w"}, "buffers": frozenset({"b"}), "frozen": frozenset({"f"})}
    state = deepspeed.read({"": Contents("zero", TREE, "", facts=facts)})
    assert state.extras == {"scheduler": {"last_epoch": 1}, "step": 3} and state.masters == {"w": T}
    (written,) = deepspeed.write(state, "universal").values()
    assert (written.tree, written.facts, written.format) == (TREE, facts, "universal")
    with pytest.raises(UsageError) as caught:
        deepspeed.write(state, "full")
    assert caught.value.why and caught.value.hint
