"""`ckptkit diff`: exit 1 and the numbers of every difference; tolerances; slots; any two formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .run import checkpoint, ckptkit

Caps = pytest.CaptureFixture[str]


def changed(source: Path, change: Any) -> Path:
    content = torch.load(source)
    change(content)
    torch.save(content, source.with_name("b.pt"))
    return source.with_name("b.pt")


def test_equal(tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")
    for to, options in (("dcp", ("--world-size", "2")), ("safetensors", ("--optimizer",)), ("full", ())):
        out = tmp_path / to
        assert ckptkit(capsys, "convert", source, out, "--to", to, *options).code == 0
        result = ckptkit(capsys, "diff", source, out)
        assert (result.code, result.out) == (0, "") and "no differences" in result.err


def test_the_numbers_of_a_difference(tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")

    def change(content: dict[str, Any]) -> None:
        content["model"]["0.weight"][:] = 2.0
        content["model"]["0.weight"][1, 2] = 3.0

    def other(content: dict[str, Any]) -> None:
        content["model"]["0.weight"][:] = 2.0
        content["model"]["0.weight"][3, 0] = 2.25

    first = changed(source, change).rename(tmp_path / "first.pt")
    second = changed(source, other)
    result = ckptkit(capsys, "diff", first, second)
    assert result.code == 1
    expected = "tensor 0.weight: value differs by 1 (relative 0.333), first at (1, 2), 2 elements\n"
    assert result.out == expected and "1 differences" in result.err
    body = ckptkit(capsys, "diff", first, second, "--json").json
    assert (body["schema"], body["equal"], body["tolerance"]) == (1, False, None)
    (only,) = body["differences"]
    assert only == {"matter": "tensor", "name": "0.weight", "kind": "value", "a": "", "b": "", "max_abs": 1.0,
                    "max_rel": pytest.approx(1 / 3), "count": 2, "first": [1, 2]}  # fmt: skip


def test_tolerance(tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")

    def change(content: dict[str, Any]) -> None:
        content["model"]["0.weight"].mul_(1 + 1e-4)
        content["model"]["1.running_mean"].add_(1)

    other = changed(source, change)
    assert ckptkit(capsys, "diff", source, other).code == 1
    assert ckptkit(capsys, "diff", source, other, "--tolerance", "1e-3", "--atol", "1.1").code == 0
    result = ckptkit(capsys, "diff", source, other, "--tolerance", "1e-3", "--atol", "1e-7")
    assert result.code == 1 and "1.running_mean" in result.out and "0.weight" not in result.out


def test_infinity_is_said_in_strict_json(tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")
    other = changed(source, lambda content: content["model"]["0.bias"].fill_(float("nan")))
    body = ckptkit(capsys, "diff", source, other, "--json", "--tolerance", "0.5").json
    assert body["differences"][0]["max_abs"] == "inf"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["model"].pop("1.num_batches_tracked"), "tensor 1.num_batches_tracked: only in a int64[]"),
        (lambda c: c["model"].update({"new": torch.ones(2, dtype=torch.int64)}), "tensor new: only in b  | int64[2]"),
        (lambda c: c["model"].update({"1.running_var": torch.ones(4)}), "tensor 1.running_var: shape [5] | [4]"),
        (lambda c: c["model"].update({"1.running_var": c["model"]["1.running_var"].double()}),
         "tensor 1.running_var: dtype float32 | float64"),
        (lambda c: c["optimizer"]["param_groups"][1].update(lr=0.5),
         "group lr of 0.bias and 2 more: value 0.01 | 0.5"),
        (lambda c: c["optimizer"]["state"][0]["step"].add_(1), "tensor 0.weight[step]: value differs by 1"),
        (lambda c: c.update(step=4), "extra step: value 3 | 4"),
        (lambda c: c["scheduler"].update(last_epoch=9), "extra scheduler.last_epoch: value 3 | 9"),
        (lambda c: c.pop("scheduler"), "extra scheduler: only in a"),
    ],
)  # fmt: skip
def test_everything_that_may_differ(change: Any, said: str, tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")
    result = ckptkit(capsys, "diff", source, changed(source, change))
    assert result.code == 1 and said in result.out, result.out


def test_slots_limit_the_comparison(tmp_path: Path, capsys: Caps) -> None:
    source = checkpoint(tmp_path / "a.pt")
    other = changed(source, lambda content: content["optimizer"]["state"][0]["exp_avg"].add_(1))
    assert ckptkit(capsys, "diff", source, other, "--slot", "value").code == 0
    assert ckptkit(capsys, "diff", source, other, "--slot", "exp_avg").code == 1
