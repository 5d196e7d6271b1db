"""full: torch files in, torch files out; what torch itself loads is what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.errors import SourceError
from ckptkit.formats import full
from tests.cli.run import checkpoint, model


def test_detection_leaves_rank_files_to_their_own_format(tmp_path: Path) -> None:
    for name in ("model_world_size_2_rank_0.pt", "lone_rank0.pt", "plain.pt"):
        torch.save({"w": torch.ones(1)}, tmp_path / name)
    assert full.detect(tmp_path / "plain.pt") == "a torch file"
    assert full.detect(tmp_path / "lone_rank0.pt") == "a torch file", "no other file of the set is there"
    assert full.detect(tmp_path / "model_world_size_2_rank_0.pt") is None
    assert full.detect(tmp_path) is None


def test_a_pickled_module_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(SourceError) as caught:
        ckptkit.open(tmp_path / "a.pt")
    assert "torch.nn.modules.linear.Linear" in caught.value.what and "state_dict()" in caught.value.hint


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("model_key", "optimizer_key"),
    [("model", "optimizer"), ("state_dict", "optim"), ("model_state_dict", "optimizer_state_dict"), ("net", "opt")],
)
def test_the_usual_names_of_a_loops_file(model_key: str, optimizer_key: str, legacy: bool, tmp_path: Path) -> None:
    content = torch.load(checkpoint(tmp_path / "a.pt"))
    renamed = {model_key: content["model"], optimizer_key: content["optimizer"], "iteration": 3, "epoch": 1}
    torch.save(renamed, tmp_path / "b.pt", _use_new_zipfile_serialization=not legacy)
    report = ckptkit.convert(tmp_path / "b.pt", tmp_path / "out", to="full", optimizer_keys="id")
    assert report.source.step == 3 and report.source.extras["epoch"] == 1
    new = torch.load(tmp_path / "out", weights_only=True)
    assert all(torch.equal(new["model"][name], tensor) for name, tensor in content["model"].items())
    net = model()
    optimizer = torch.optim.AdamW([{"params": [p for p in net.parameters() if p.dim() > 1]},
                                   {"params": [p for p in net.parameters() if p.dim() == 1]}])  # fmt: skip
    net.load_state_dict(new["model"])
    optimizer.load_state_dict(new["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {int(slots["step"]) for slots in optimizer.state.values()} == {3}


def test_tied_views_and_buffers_come_back_as_they_were(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    state = {"emb": base, "head": base, "turned": base.t(), "n": torch.tensor(2**40 + 3), "mask": torch.ones(3) > 0,
             "scalar": torch.tensor(3.25), "none": torch.empty(0, 4)}  # fmt: skip
    torch.save(state, tmp_path / "a.pt")
    ckptkit.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="full")
    new = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    assert set(new) == set(state)
    for name, tensor in state.items():
        assert new[name].dtype == tensor.dtype and torch.equal(new[name], tensor)
    assert new["emb"].data_ptr() == new["head"].data_ptr() != new["turned"].data_ptr()


def test_a_quantized_weight_does_not_hide_the_others(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, tmp_path / "a")
    opened = ckptkit.open(tmp_path / "a")
    assert torch.equal(opened.read("w"), torch.ones(2))
    assert [drop.what for drop in opened.drops] == ["model_extra_state.q"]
