"""safetensors: what safetensors and transformers load from what is written, and what is refused when damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.errors import SourceError, UsageError
from tests.cli.run import checkpoint


def tiny(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=61, n_positions=9, n_embd=21, n_layer=2, n_head=3, n_inner=37)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                                     intermediate_size=37, max_position_embeddings=11)  # fmt: skip
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize("limit", [5_000_000_000, 20_000])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_transformers_loads_what_is_written(kind: str, limit: int, tmp_path: Path) -> None:
    """From a plain torch file with tied weights: from_pretrained finds every weight, ties again, computes the same."""
    net = tiny(kind).eval()
    torch.save({"model": net.state_dict()}, tmp_path / "a.pt")
    out = tmp_path / "out"
    report = ckptkit.convert(tmp_path / "a.pt", out, to="safetensors", max_shard_size=limit)
    assert report.source.aliases, "the models tie their heads"
    assert ((out / "model.safetensors.index.json").exists()) == (limit < 1_000_000)
    net.config.save_pretrained(out)
    loaded, info = type(net).from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    mine, theirs = net.state_dict(), loaded.state_dict()
    assert list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)
    tokens = torch.arange(8).reshape(1, 8)
    assert torch.equal(net(tokens).logits, loaded.eval()(tokens).logits)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    net = tiny("gpt2")
    net.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    opened = ckptkit.open(tmp_path / "a")
    for name, tensor in net.state_dict().items():
        if name != "lm_head.weight":  # transformers keeps it out of the files and ties it again
            assert torch.equal(opened.read(name), tensor)


def test_the_library_reads_every_dtype(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool,
              torch.uint8, torch.float8_e4m3fn]  # fmt: skip
    state = {str(dtype): torch.arange(7).to(torch.float32).to(dtype) for dtype in dtypes}
    state |= {"0-d": torch.tensor(3.25), "empty": torch.empty(0, 2), "0-d int": torch.tensor(2**40 + 3)}
    torch.save({"model": state}, tmp_path / "a.pt")
    out = tmp_path / "model.safetensors"
    ckptkit.convert(tmp_path / "a.pt", out, to="safetensors")
    held = load_file(out)
    assert set(held) == set(state)
    for name, tensor in state.items():
        assert held[name].dtype == tensor.dtype and held[name].shape == tensor.shape
        assert torch.equal(held[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    save_file(state, tmp_path / "theirs.safetensors")
    assert ckptkit.diff(out, tmp_path / "theirs.safetensors").equal


def test_the_optimizer_has_a_file_of_its_own(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a.pt", note={"seen": (1, b"\x00", None)})
    ckptkit.convert(source, tmp_path / "out", to="safetensors", optimizer=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.safetensors", "optimizer.safetensors"]
    assert ckptkit.diff(source, tmp_path / "out").equal
    moment = torch.load(source)["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(load_file(tmp_path / "out" / "optimizer.safetensors")["0.weight.exp_avg"], moment)


def test_what_the_format_cannot_hold_is_named(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}, "s": {1}}, tmp_path / "a.pt")
    report = ckptkit.convert(tmp_path / "a.pt", tmp_path / "x", to="safetensors", dry_run=True)
    assert {drop.what for drop in report.plan.drops} == {"model.c", "s"}
    named = ckptkit.convert(tmp_path / "a.pt", tmp_path / "x", to="safetensors", optimizer=True, dry_run=True)
    assert {drop.what for drop in named.plan.drops} == {"model.c", "s"}
    ckptkit.convert(tmp_path / "a.pt", tmp_path / "x", to="safetensors", optimizer=True, allow_drop=True)
    assert set(load_file(tmp_path / "x" / "model.safetensors")) == {"w"}


def test_one_file_stays_one_file(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "a.pt"), tmp_path / "m.safetensors"
    with pytest.raises(UsageError, match=r"one .safetensors file"):
        ckptkit.convert(source, out, to="safetensors", weights_only=True, max_shard_size=64)
    assert not out.exists()


def rewritten(path: Path, change: Any) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = json.dumps(header).encode() if text is None else text
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["w"].update(data_offsets=[0, 1 << 40]),
        lambda h: h["w"].update(data_offsets=[-8, 8]),
        lambda h: h["w"].update(data_offsets=[8, 0]),
        lambda h: h["w"].update(shape=[-4]),
        lambda h: h["w"].update(shape=[1 << 62, 1 << 62]),
        lambda h: h["w"].update(dtype="F3"),
        lambda h: h["w"].pop("shape") and None,
        lambda h: h.update(w=[1]),
        lambda h: b"[]",
        lambda h: b"{",
        lambda h: b"[" * 200_000,
        lambda h: b"\xff\xfe",
    ],
)
def test_a_header_that_does_not_fit_is_an_error(change: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(4)}, path)
    assert ckptkit.open(path)
    rewritten(path, change)
    with pytest.raises(SourceError) as caught:
        ckptkit.open(path)
    assert caught.value.why and caught.value.hint


@pytest.mark.parametrize("size", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_an_error(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SourceError):
        ckptkit.open(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index, root: (root / "model-00001-of-00002.safetensors").unlink(), "lacks 1 of the 2 files"),
        (lambda index, root: index["weight_map"].update(gone="model-00001-of-00002.safetensors"), "lacks 1 tensors"),
        (lambda index, root: index["weight_map"].update(w="../x.safetensors"), "outside"),
        (lambda index, root: index.pop("weight_map"), "no index"),
        (lambda index, root: save_file({"a": torch.ones(4), "b": torch.ones(4)},
                                       root / "model-00001-of-00002.safetensors"), "another file holds too"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_its_files_is_an_error(change: Any, said: str, tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(4), "b": torch.ones(4)}}, tmp_path / "a.pt")
    root = tmp_path / "out"
    ckptkit.convert(tmp_path / "a.pt", root, to="safetensors", max_shard_size=16)
    index = json.loads((root / "model.safetensors.index.json").read_text())
    change(index, root)
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=said) as caught:
        ckptkit.open(root)
    assert caught.value.why and caught.value.hint
