"""The command of `verify`: three forms, their exit codes, the report files, and the CI example that stays valid."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from ckptkit.cli import verify as command
from ckptkit.cli.main import main
from ruamel.yaml import YAML

from ckptkit.verify import script
from ckptkit.verify.report import Report, judge
from ckptkit.verify.tolerance import FP32
from ckptkit.verify.trace import StepRecord, Trace

EXAMPLE = Path(__file__).parents[2] / "fixtures" / "ci" / "verify.yml"


def trace(label: str, *losses: float) -> Trace:
    return Trace(label, label, 1, "fp32", tuple(StepRecord(i, loss) for i, loss in enumerate(losses)))


@pytest.fixture
def asked(monkeypatch, request):
    """What the scripts form was asked for; it answers a report without running anything."""
    seen = {}
    losses = getattr(request, "param", (2.0, 1.0))

    def answer(old, new, options, *, rewrite, progress):
        seen.update(old=old, new=new, options=options)
        finding = judge(trace("old", 2.0, 1.0), trace("new", *losses), FP32)
        return Report("code", "old against new", (finding,), {"torch": "2"})

    monkeypatch.setattr(script, "verify_scripts", answer)
    return seen


def test_arguments_after_the_scripts_reach_them(asked, capsys):
    assert main(["verify", "a.py", "b.py", "--device", "cpu", "--steps", "7", "--", "--epochs", "3"]) == 0
    assert (asked["old"], asked["new"]) == (Path("a.py"), Path("b.py"))
    assert asked["options"].args == ("--epochs", "3")
    assert (asked["options"].steps, asked["options"].device, asked["options"].world_size) == (7, "cpu", 2)
    assert "1 equal" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [(2.0, 1.5)], indirect=True)
def test_a_mismatch_exits_1_and_all_reports_say_so(asked, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    xml, page = tmp_path / "r.xml", tmp_path / "r.html"
    assert main(["verify", "a.py", "b.py", "--json", "--junit", str(xml), "--html", str(page)]) == 1
    out, err = capsys.readouterr()
    body = json.loads(out)
    assert body["schema"] == 1 and body["exit_code"] == 1 and body["findings"][0]["verdict"] == "mismatch"
    assert err.startswith("::error title=ckptkit verify code")
    assert "<failure type=" in xml.read_text() and "does not match" in page.read_text()
    assert main(["verify", "a.py", "b.py", "--html", str(page)]) == 4
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--converted", "x"],
        ["a.py", "--checkpoint", "x"],
        ["train"],
        ["a.py", "--precision", "fp32", "--precision", "bf16"],
        ["--steps", "0"],
        ["--device", "tpu"],
        ["--model", "a:b"],
        ["--strategies", "nosuch"],
    ],
)
def test_usage_errors_exit_2(arguments, capsys):
    assert main(["verify", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_missing_script_or_checkpoint_exits_3(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none.py"), "--device", "cpu"]) == 3
    assert main(["verify", "--checkpoint", str(tmp_path / "none"), "--device", "cpu", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["code"] == 3


def test_the_ci_example_is_valid(asked, tmp_path, monkeypatch):
    """Its YAML parses and its command line is one that the command takes, word for word."""
    workflow = YAML(typ="safe").load(EXAMPLE.read_text(encoding="utf-8"))
    steps = workflow["jobs"]["verify"]["steps"]
    lines = [step["run"] for step in steps if "ckptkit verify" in step.get("run", "")]
    assert len(lines) == 1
    words = shlex.split(lines[0])
    assert words[:2] == ["ckptkit", "verify"]
    written = [words[words.index(option) + 1] for option in ("--junit", "--html")]
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0
    assert all((tmp_path / name).exists() for name in written)
    assert asked["options"].args == ("--config", "tiny.yaml") and asked["options"].device == "cpu"
    uploaded = next(step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", ""))
    assert uploaded.split() == written


def test_the_help_names_every_exit_code_that_it_uses():
    assert re.findall(r"\b[0-3]\b", command.command.__doc__.partition("Exit codes:")[2]) == ["0", "1", "2", "3"]
