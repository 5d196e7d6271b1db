"""`ckptkit inspect`: what a checkpoint holds, from headers alone, for people and as strict JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptkit.io.places import FileExtent

from .run import checkpoint, ckptkit

Caps = pytest.CaptureFixture[str]


def test_what_people_read(tmp_path: Path, capsys: Caps) -> None:
    result = ckptkit(capsys, "inspect", checkpoint(tmp_path / "a.pt"))
    assert (result.code, result.err) == (0, "")
    for line in ("source:     full, dialect plain (a torch file, keys 'model' and 'optimizer')", "step:       3",
                 "model:      40 parameters, 3 buffers", "group 0:    2 parameters; weight_decay=0.1, lr=0.01",
                 "group 1:    3 parameters", "extra:      scheduler"):  # fmt: skip
        assert line in result.out, result.out
    assert "exp_avg_sq" in result.out and "0.weight" not in result.out


def test_tensors_are_listed_with_dtype_shape_and_role(tmp_path: Path, capsys: Caps) -> None:
    lines = ckptkit(capsys, "inspect", checkpoint(tmp_path / "a.pt"), "--tensors").out.splitlines()
    fields = [line.split() for line in lines]
    assert ["float32", "[5,", "3]", "param", "0.weight"] in fields
    assert ["int64", "[]", "buffer", "1.num_batches_tracked"] in fields
    assert ["float32", "[]", "optim", "0.weight[step]"] in fields


def test_json_is_strict_whatever_is_inside(tmp_path: Path, capsys: Caps) -> None:
    odd = {"best": float("inf"), "by pair": {(1, 2): float("nan")}, "bytes": b"x", "rng": torch.get_rng_state()}
    body = ckptkit(capsys, "inspect", checkpoint(tmp_path / "a.pt", **odd), "--json").json
    assert (body["schema"], body["format"], body["dialect"], body["step"]) == (1, "full", "plain", 3)
    assert body["extras"]["best"] == "inf" and body["extras"]["by pair"] == {"(1, 2)": "nan"}
    assert {"fqn": "0.weight", "slot": "exp_avg", "shape": [5, 3], "dtype": "float32", "role": "optim"} in body[
        "tensors"
    ]
    assert body["param_groups"][0]["params"] == ["0.weight", "2.weight"]


def test_no_tensor_byte_is_read(tmp_path: Path, capsys: Caps, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FileExtent, start: int, buffer: memoryview) -> None:
        raise AssertionError("inspect reads headers only")

    monkeypatch.setattr(FileExtent, "read_into", refuse)
    source = checkpoint(tmp_path / "a.pt")
    assert ckptkit(capsys, "inspect", source, "--tensors").code == 0
