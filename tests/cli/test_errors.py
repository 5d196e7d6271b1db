"""Errors on the screen and as JSON: three lines, every fault, the documented exit code of each class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import conversion
from ckptkit.errors import Exit

from .run import checkpoint, ckptkit


def cases(tmp_path: Path) -> dict[str, tuple[list[object], Exit]]:
    good, out = checkpoint(tmp_path / "good.pt"), tmp_path / "out"
    cut = tmp_path / "cut.pt"
    cut.write_bytes(good.read_bytes()[:3000])
    (tmp_path / "text").write_text("hello")
    (tmp_path / "taken").mkdir()
    torch.save({"something": {"else": 1}}, tmp_path / "odd.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"model": model_without_order()}, tmp_path / "args.pt")
    (tmp_path / "names").write_text("a\nb\n")
    return {
        "unknown command": (["explode"], Exit.USAGE),
        "unknown option": (["convert", good, out, "--to", "full", "--fast"], Exit.USAGE),
        "missing option": (["convert", good, out], Exit.USAGE),
        "missing argument": (["inspect"], Exit.USAGE),
        "bad choice": (["convert", good, out, "--to", "full", "--check", "some"], Exit.USAGE),
        "bad number": (["convert", good, out, "--to", "full", "--workers", "0"], Exit.USAGE),
        "unknown target": (["convert", good, out, "--to", "onnx"], Exit.USAGE),
        "unknown source format": (["inspect", good, "--from", "onnx"], Exit.USAGE),
        "unknown source dialect": (["inspect", good, "--dialect", "klingon"], Exit.USAGE),
        "unknown target dialect": (["convert", good, out, "--to", "full", "--dialect", "klingon"], Exit.USAGE),
        "a dialect that does not write it": (
            ["convert", good, out, "--to", "full", "--dialect", "torchtitan"], Exit.USAGE),
        "unknown dtype": (["convert", good, out, "--to", "full", "--dtype", "int3"], Exit.USAGE),
        "bad size": (["convert", good, out, "--to", "safetensors", "--max-shard-size", "5XB"], Exit.USAGE),
        "bad rename": (["convert", good, out, "--to", "full", "--rename", "(="], Exit.USAGE),
        "rename onto another": (["convert", good, out, "--to", "full", "--rename", "running_.*=x"], Exit.USAGE),
        "model without a colon": (["inspect", good, "--model", "nothing"], Exit.USAGE),
        "model that is not there": (["inspect", good, "--model", "no_such_module:f"], Exit.USAGE),
        "names that are not there": (
            ["convert", good, out, "--to", "full", "--param-names", tmp_path / "no"], Exit.USAGE),
        "config that is no JSON": (
            ["convert", good, out, "--to", "full", "--ds-config", tmp_path / "text"], Exit.USAGE),
        "target over its source": (["convert", good, good, "--to", "full", "--overwrite"], Exit.USAGE),
        "one file that would be two": (
            ["convert", good, tmp_path / "m.safetensors", "--to", "safetensors", "--optimizer"], Exit.USAGE),
        "negative tolerance": (["diff", good, good, "--tolerance", "-1"], Exit.USAGE),
        "unknown page": (["explain", "nothing"], Exit.USAGE),
        "absent source": (["inspect", tmp_path / "absent"], Exit.SOURCE),
        "truncated source": (["convert", cut, out, "--to", "full"], Exit.SOURCE),
        "source of no format": (["diff", tmp_path / "text", good], Exit.SOURCE),
        "unknown keys": (["inspect", tmp_path / "odd.pt"], Exit.SOURCE),
        "a list": (["inspect", tmp_path / "list.pt"], Exit.SOURCE),
        "wrong count of names": (
            ["convert", good, out, "--to", "full", "--param-names", tmp_path / "names"], Exit.SOURCE),
        "target exists": (["convert", good, tmp_path / "taken", "--to", "dcp"], Exit.EXISTS),
        "target below a file": (["convert", good, tmp_path / "text" / "x", "--to", "full"], Exit.EXISTS),
        "no room for the optimizer": (["convert", good, out, "--to", "safetensors"], Exit.LOSS),
        "an unknown object": (["convert", tmp_path / "args.pt", out, "--to", "full"], Exit.LOSS),
    }  # fmt: skip


def model_without_order() -> dict[str, Any]:
    import argparse

    return {"w": torch.ones(2), "meta._extra_state": argparse.Namespace(x=1)}


@pytest.fixture(scope="module")
def all_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[object], Exit]]:
    return cases(tmp_path_factory.mktemp("cases"))


def test_every_error_has_its_code_and_three_lines(
    all_cases: dict[str, tuple[list[object], Exit]], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for name, (arguments, code) in all_cases.items():
        result = ckptkit(capsys, *arguments)
        lines = result.error
        if result.code != code or list(lines) != ["error", "why", "hint"] or not all(lines.values()) or result.out:
            wrong.append((name, result))
    assert wrong == []


def test_every_error_as_json(
    all_cases: dict[str, tuple[list[object], Exit]], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for name, (arguments, code) in all_cases.items():
        result = ckptkit(capsys, *arguments, "--json")
        body = result.json
        error = body.get("error", {})
        whole = {"kind", "what", "why", "hint", "faults", "code"} == set(error) and all(
            error[key] for key in ("kind", "what", "why", "hint")
        )
        if body["schema"] != 1 or not whole or (result.code, error["code"]) != (code, code) or result.err:
            wrong.append((name, result))
    assert wrong == []


def test_an_error_leaves_no_output(
    all_cases: dict[str, tuple[list[object], Exit]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for arguments, _ in all_cases.values():
        for each in arguments:
            if isinstance(each, Path) and each.name in ("out", "m.safetensors"):
                assert not each.exists() and not list(each.parent.glob(".*partial*"))


def test_all_faults_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = ckptkit(capsys, "convert", checkpoint(tmp_path / "a.pt"), tmp_path / "out", "--to", "safetensors")
    faults = [line for line in result.err.splitlines() if line.startswith("  - ")]
    assert [fault.split(":")[0] for fault in faults] == ["  - optimizer", "  - scheduler", "  - step"]


@pytest.mark.parametrize("flip", ["value", "shape", "group"])
def test_a_check_that_fails_removes_the_output(
    flip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of the staged file is changed before it is read back."""
    execute = conversion.execute

    def corrupted(layout: Any, create: Any, *args: Any, **options: Any) -> None:
        execute(layout, create, *args, **options)
        (staged,) = tmp_path.glob(".out*")
        content = torch.load(staged)
        if flip == "value":
            content["model"]["0.weight"].view(torch.int32)[2, 1] ^= 1
        elif flip == "shape":
            content["model"]["0.weight"] = content["model"]["0.weight"].t()
        else:
            content["optimizer"]["param_groups"][0]["weight_decay"] = 0.2
        torch.save(content, staged)

    monkeypatch.setattr(conversion, "execute", corrupted)
    source = checkpoint(tmp_path / "a.pt")
    before = source.read_bytes()
    result = ckptkit(capsys, "convert", source, tmp_path / "out", "--to", "full")
    assert result.code == Exit.CHECK and list(result.error) == ["error", "why", "hint"]
    assert {"value": "first at (2, 1)", "shape": "shape", "group": "weight_decay"}[flip] in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"] and source.read_bytes() == before
    if flip == "value":  # the control: without the check it would have stayed
        assert ckptkit(capsys, "convert", source, tmp_path / "out", "--to", "full", "--check", "none").code == 0
        assert ckptkit(capsys, "diff", source, tmp_path / "out").code == Exit.FINDINGS


def test_a_bug_says_so_and_shows_its_traceback_only_with_debug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(conversion, "prepare", broken)
    command = ("convert", checkpoint(tmp_path / "a.pt"), tmp_path / "out", "--to", "full")
    result = ckptkit(capsys, *command)
    assert result.code == Exit.BUG and "Traceback" not in result.err and "ZeroDivisionError" in result.error["error"]
    assert list(result.error) == ["error", "why", "hint"]
    assert "Traceback" in ckptkit(capsys, *command, "--debug").err
    assert ckptkit(capsys, *command, "--json").json["error"]["code"] == 101


def test_an_interrupt_is_130_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "execute", interrupted)
    result = ckptkit(capsys, "convert", checkpoint(tmp_path / "a.pt"), tmp_path / "out", "--to", "full")
    assert result.code == Exit.INTERRUPTED and list(result.error) == ["error", "why", "hint"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
