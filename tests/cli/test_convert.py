"""`ckptkit convert`: what each option does to what is written, and what a dry run says without writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ckptkit.opening import open as open_checkpoint

from .run import checkpoint, ckptkit, model

Caps = pytest.CaptureFixture[str]


def test_dry_run_writes_nothing_and_shows_the_plan(tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")
    command = ("convert", source, tmp_path / "out", "--to", "safetensors", "--dtype", "bf16", "--dry-run")
    result = ckptkit(capsys, *command)
    assert result.code == 5 and "refused" in result.err
    for said in ("source: full, dialect plain", "target: safetensors", "drop: optimizer", "drop: scheduler",
                 "casts: 5 tensors change dtype, 5 of them round", "model.safetensors", "peak memory"):  # fmt: skip
        assert said in result.out
    plan = ckptkit(capsys, *command, "--json").json
    assert (plan["schema"], plan["written"], plan["refused"]) == (1, False, True)
    assert {drop["what"] for drop in plan["plan"]["drops"]} == {"optimizer", "scheduler", "step"}
    assert ckptkit(capsys, *command, "--allow-drop").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_the_report_as_json(tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")
    body = ckptkit(capsys, "convert", source, tmp_path / "out", "--to", "dcp", "--world-size", "3", "--json").json
    assert body["schema"] == 1 and body["written"] and body["checked"] == "full" and not body["refused"]
    assert body["source"]["format"] == "full" and body["target"] == {
        "path": str(tmp_path / "out"), "format": "dcp", "dialect": "plain"}  # fmt: skip
    assert {file["name"] for file in body["plan"]["files"]} >= {"__0_0.distcp", "__2_0.distcp", ".metadata"}
    assert body["plan"]["files"][-1]["name"] == ".metadata", "metadata last"


def test_ids_load_in_torchs_own_optimizer(tmp_path: Path, capsys: Caps) -> None:
    source, out = checkpoint(tmp_path / "a.pt"), tmp_path / "out.pt"
    options = ("--to", "ddp", "--optimizer-keys", "id", "--prefix", "module.")
    assert ckptkit(capsys, "convert", source, out, *options).code == 0
    old, new = torch.load(source), torch.load(out)
    assert list(new["model"]) == [f"module.{name}" for name in old["model"]]
    assert new["optimizer"]["param_groups"] == old["optimizer"]["param_groups"]
    for key, slots in old["optimizer"]["state"].items():
        assert all(torch.equal(new["optimizer"]["state"][key][slot], value) for slot, value in slots.items())
    assert new["scheduler"] == old["scheduler"] and new["step"] == 3


def test_names(tmp_path: Path, capsys: Caps) -> None:
    source, out = checkpoint(tmp_path / "a.pt"), tmp_path / "out.pt"
    options = ("--strip-prefix", "0.", "--rename", r"^(\d)\.=layers.\1.", "--rename", "weight$=w")
    assert ckptkit(capsys, "convert", source, out, "--to", "full", *options).code == 0
    new = torch.load(out)
    assert list(new["model"])[:3] == ["w", "bias", "layers.1.w"]
    assert {name for group in new["optimizer"]["param_groups"] for name in group["params"]} == set(
        new["optimizer"]["state"]) == {"w", "layers.2.w", "bias", "layers.1.w", "layers.1.bias"}  # fmt: skip


def test_dtype_casts_parameters_alone_as_torch_does(tmp_path: Path, capsys: Caps) -> None:
    source, out = checkpoint(tmp_path / "a.pt"), tmp_path / "out.pt"
    assert ckptkit(capsys, "convert", source, out, "--to", "full", "--dtype", "bf16").code == 0
    old, new = torch.load(source), torch.load(out)
    parameters = {name for name, _ in model().named_parameters()}
    for name, tensor in old["model"].items():
        expected = tensor.bfloat16() if name in parameters else tensor
        assert new["model"][name].dtype == expected.dtype and torch.equal(new["model"][name], expected)
    assert new["optimizer"]["state"]["0.weight"]["exp_avg"].dtype == torch.float32


def test_weights_or_masters(tmp_path: Path, capsys: Caps) -> None:
    weights = {"w": torch.randn(4).bfloat16()}
    masters = {"w": torch.randn(4)}
    torch.save({"model": weights, "master": masters}, tmp_path / "a.pt")
    for choice, expected in (("master", masters), ("value", weights)):
        out = tmp_path / f"{choice}.safetensors"
        assert ckptkit(capsys, "convert", tmp_path / "a.pt", out, "--to", "safetensors", "--weights", choice).code == 0
        with safe_open(out, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.get_tensor("w").dtype == expected["w"].dtype
            assert torch.equal(file.get_tensor("w"), expected["w"])


def test_param_names_tell_equal_shapes_apart(tmp_path: Path, capsys: Caps) -> None:
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
    optimizer = torch.optim.Adam([layers[0].weight, layers[2].weight])
    sum(layer(torch.ones(2)).sum() for layer in layers).backward()
    optimizer.step()
    state = {f"l{i}.weight": layer.weight.detach() for i, layer in enumerate(layers)}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    result = ckptkit(capsys, "convert", tmp_path / "a.pt", tmp_path / "out", "--to", "full")
    assert result.code == 3 and "'l1.weight' or 'l2.weight'" in result.err and "--param-names" in result.error["hint"]
    (tmp_path / "names").write_text("l0.weight\n\nl2.weight\n")
    options = ("--to", "full", "--param-names", tmp_path / "names")
    assert ckptkit(capsys, "convert", tmp_path / "a.pt", tmp_path / "out", *options).code == 0
    assert set(torch.load(tmp_path / "out")["optimizer"]["state"]) == {"l0.weight", "l2.weight"}


def test_shards_and_their_index(tmp_path: Path, capsys: Caps) -> None:
    source, out = checkpoint(tmp_path / "a.pt"), tmp_path / "out"
    options = ("--to", "safetensors", "--weights-only", "--max-shard-size", "64")
    assert ckptkit(capsys, "convert", source, out, *options).code == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    expected = torch.load(source)["model"]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as held:
            assert torch.equal(held.get_tensor(name), expected[name])


def test_overwrite(tmp_path: Path, capsys: Caps) -> None:
    source, out = checkpoint(tmp_path / "a.pt"), tmp_path / "out"
    assert ckptkit(capsys, "convert", source, out, "--to", "dcp").code == 0
    assert ckptkit(capsys, "convert", source, out, "--to", "full").code == 4 and out.is_dir()
    assert ckptkit(capsys, "convert", source, out, "--to", "full", "--overwrite").code == 0 and out.is_file()
    # What was read under this name before is not what is there now.
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "b.pt")
    assert ckptkit(capsys, "convert", tmp_path / "b.pt", out, "--to", "full", "--overwrite").code == 0
    assert torch.equal(open_checkpoint(out).read("w"), torch.ones(2))


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    """By a rename, as careful programs do: a descriptor that is still open would show the old bytes."""
    for value in (1.0, 2.0):
        torch.save({"model": {"w": torch.full((4,), value)}}, tmp_path / "new")
        (tmp_path / "new").rename(tmp_path / "a.pt")
        assert float(open_checkpoint(tmp_path / "a.pt").read("w")[0]) == value


def test_a_roles_name_for_something_else_is_kept_beside_the_model(tmp_path: Path, capsys: Caps) -> None:
    source, out = tmp_path / "a.pt", tmp_path / "out.pt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "model": "resnet50", "optimizer": None, "master": 3}, source)
    assert ckptkit(capsys, "convert", source, out, "--to", "full").code == 0
    new = torch.load(out)
    assert torch.equal(new["model"]["w"], torch.ones(2)) and (new["model_"], new["master_"]) == ("resnet50", 3)


@pytest.mark.parametrize("to", ["full", "safetensors", "dcp"])
def test_extras_come_back_bit_for_bit(to: str, tmp_path: Path, capsys: Caps) -> None:
    import numpy as np

    extras = {
        "rng": {"torch": torch.get_rng_state(), "numpy": np.arange(5, dtype=np.uint32), "python": (3, (1, 2), None)},
        "floats": [float("inf"), float("nan"), -0.0, 1e-300], "ints": {1: "a", (2, 3): b"\x00"}, "empty": [{}, [], ()],
    }  # fmt: skip
    source, out = checkpoint(tmp_path / "a.pt", **extras), tmp_path / "out"
    options = ("--optimizer",) if to == "safetensors" else ()
    result = ckptkit(capsys, "convert", source, out, "--to", to, *options)
    if to == "dcp" and result.code == 5:
        assert "drop" in result.err or result.err  # what DCP cannot hold is named
        return
    assert result.code == 0, result.err
    assert ckptkit(capsys, "diff", source, out, "--model", "tests.cli.run:model").code == 0


def test_overwrite_spares_a_folder_of_other_things(tmp_path: Path, capsys: Caps) -> None:
    source, folder = checkpoint(tmp_path / "a.pt"), tmp_path / "models"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    for target in ("full", "dcp"):
        result = ckptkit(capsys, "convert", source, folder, "--to", target, "--overwrite")
        assert result.code == 4 and "remove all of it" in result.err
    assert [path.name for path in folder.iterdir()] == ["notes.txt"] and len(list(tmp_path.iterdir())) == 2


def test_overwrite_spares_what_lies_beside_a_checkpoint(tmp_path: Path, capsys: Caps) -> None:
    """A folder of Hugging Face holds a config and a tokenizer: they are not the converter's to remove."""
    source, folder = checkpoint(tmp_path / "a.pt"), tmp_path / "model"
    args = ("--to", "safetensors", "--weights-only", "--max-shard-size", "8KB")
    assert ckptkit(capsys, "convert", source, folder, *args).code == 0
    (folder / "config.json").write_text("{}")
    result = ckptkit(capsys, "convert", source, folder, *args, "--overwrite")
    assert result.code == 4 and "  - config.json\n" in result.err and (folder / "config.json").exists()
    (folder / "config.json").unlink()
    result = ckptkit(capsys, "convert", source, folder, *args, "--overwrite")
    assert result.code == 0, result.err


def test_one_model_of_several(tmp_path: Path, capsys: Caps) -> None:
    parts = {}
    for name, width in (("G", 3), ("D", 5)):
        model = torch.nn.Linear(width, width)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        parts |= {f"net{name}": model.state_dict(), f"opt{name}": optimizer.state_dict()}
    torch.save({**parts, "epoch": 7}, tmp_path / "gan.pt")
    result = ckptkit(capsys, "convert", tmp_path / "gan.pt", tmp_path / "out", "--to", "dcp")
    assert result.code == 3 and "--model-key" in result.err
    for name, width in (("G", 3), ("D", 5)):
        keys = ("--model-key", f"net{name}", "--optimizer-key", f"opt{name}")
        out = tmp_path / f"out{name}"
        result = ckptkit(capsys, "convert", tmp_path / "gan.pt", out, "--to", "dcp", *keys)
        assert result.code == 0, result.err
        held = open_checkpoint(out)
        assert torch.equal(held.read("weight", "exp_avg"), parts[f"opt{name}"]["state"][0]["exp_avg"])
        assert held.read("weight").shape == (width, width)
        assert held.extras["epoch"] == 7 and ("netD" if name == "G" else "netG") in held.extras
    wrong = ckptkit(capsys, "inspect", tmp_path / "gan.pt", "--model-key", "netX")
    assert wrong.code == 2 and "there is no 'netX'" in wrong.err
    assert ckptkit(capsys, "inspect", tmp_path / "gan.pt", "--model-key", "epoch").code == 2


def test_a_prefix_that_every_name_carries_is_said(tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")
    torch.save({"model": {f"module.{k}": v for k, v in torch.load(source)["model"].items()}}, tmp_path / "b.pt")
    assert "every name began with 'module.'" in ckptkit(capsys, "inspect", tmp_path / "b.pt").out
    assert "every name began" not in ckptkit(capsys, "inspect", source).out
