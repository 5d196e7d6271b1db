"""The command line of migrate: diffs, options, files of every kind, what is written, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckptkit import migrate
from ckptkit.errors import Exit

from .run import Result, ckptkit

SCRIPT = """\
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

model = nn.Linear(2, 2)   # two   blanks
model = FSDP(model)  # wrapped
"""
AFTER = SCRIPT.replace("import FullyShardedDataParallel as FSDP", "import fully_shard").replace(
    "model = FSDP(model)", "fully_shard(model)"
)
MANUAL = SCRIPT + "\n\nclass Mine(FSDP):\n    pass\n"
OTHER = "import json\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Result:
        return ckptkit(capsys, "migrate", *arguments)

    return call


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- what is printed ------------------------------------------------------------------------------------------------


def test_a_diff_goes_to_stdout_and_the_rest_to_stderr(here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT)
    result = run("train.py")
    assert result.code == Exit.OK and files(here) == {"train.py": SCRIPT.encode()}
    assert result.out.splitlines()[:3] == ["--- a/train.py", "+++ b/train.py", "@@ -1,5 +1,5 @@"]
    assert "train.py:5:9 exact wrap " in result.err and "1 would change" in result.err
    assert "exact" not in result.out and "@@" not in result.err


@pytest.mark.parametrize(
    "data",
    [
        SCRIPT.encode(),
        SCRIPT.rstrip("\n").encode(),
        SCRIPT.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + SCRIPT.encode(),
        SCRIPT.replace("\n\n", "\n\n\f\n").encode(),
        SCRIPT.replace("two", "zw\u00f6lf \u2028").encode(),
        MANUAL.encode(),
    ],
    ids=["plain", "no newline at the end", "crlf", "bom", "form feed", "not ascii", "with a todo"],
)
def test_git_applies_the_diff_to_what_write_writes(data: bytes, here: Path, run: Any) -> None:
    """The diff is no picture of the change: applied, it gives the very bytes that --write would."""
    (here / "sub").mkdir()
    (here / "sub" / "train.py").write_bytes(data)
    diff = run(".").out
    subprocess.run(["git", "apply", "--unsafe-paths", "-"], input=diff.encode(), check=True, cwd=here)
    applied = files(here)
    assert applied["sub/train.py"] != data
    (here / "sub" / "train.py").write_bytes(data)
    run(".", "--write")
    assert files(here) == applied


def test_write_changes_the_file_and_a_second_run_nothing(here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT)
    (here / "train.py").chmod(0o750)
    result = run("train.py", "--write")
    assert result.code == Exit.OK and result.out == "" and "1 changed" in result.err
    assert (here / "train.py").read_text() == AFTER and (here / "train.py").stat().st_mode & 0o777 == 0o750
    before = (here / "train.py").stat()
    again = run("train.py", "--write")
    assert again.out == "" and "0 changed" in again.err
    after = (here / "train.py").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_check_is_1_when_something_would_change_and_changes_nothing(here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT)
    result = run(".", "--check")
    assert (result.code, result.out) == (Exit.FINDINGS, "") and "1 would change" in result.err
    assert files(here) == {"train.py": SCRIPT.encode()}
    run(".", "--write")
    assert run(".", "--check").code == Exit.OK


def test_check_sees_configuration_files_too(here: Path, run: Any) -> None:
    (here / "a.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n")
    assert run(".", "--check").code == Exit.FINDINGS


def test_what_is_left_for_a_person_is_1_and_has_its_todo(here: Path, run: Any) -> None:
    (here / "train.py").write_text(MANUAL)
    result = run("train.py", "--write")
    assert result.code == Exit.FINDINGS and "1 left for a person" in result.err
    assert "train.py:8:1 manual wrap " in result.err
    assert "# TODO(ckptkit): " in (here / "train.py").read_text()
    assert run("train.py", "--check").code == Exit.FINDINGS  # it is still left


def test_nothing_to_do_is_0(here: Path, run: Any) -> None:
    (here / "train.py").write_text(AFTER)
    (here / "other.py").write_text(OTHER)
    for options in ((), ("--check",), ("--write",)):
        result = run(".", *options)
        assert (result.code, result.out) == (Exit.OK, "") and "1 do not use the APIs" in result.err


def test_json_has_one_object_with_all_of_it(here: Path, run: Any) -> None:
    (here / "train.py").write_text(MANUAL)
    (here / "bad.py").write_text(SCRIPT + "def broken(:\n")
    (here / "other.py").write_text(OTHER)
    result = run(".", "--json")
    body = result.json
    assert result.err == "" and result.code == Exit.SOURCE
    assert set(body) == {"schema", "written", "skipped", "files", "findings", "commands"}
    assert (body["schema"], body["written"], body["skipped"], body["commands"]) == (1, False, 1, [])
    assert [(one["path"], one["outcome"]) for one in body["files"]] == [("bad.py", "failed"), ("train.py", "changed")]
    assert body["files"][0]["line"] == 6 and "syntax error" in body["files"][0]["reason"]
    assert body["files"][1]["diff"].startswith("--- a/train.py\n+++ b/train.py\n@@ ")
    assert {frozenset(one) for one in body["findings"]} == {
        frozenset(("path", "line", "column", "grade", "rule", "message"))
    }
    assert {one["grade"] for one in body["findings"]} == {"exact", "manual"}
    assert run(".", "--json", "--write").json["written"] is True


def test_errors_are_json_of_the_same_form_as_elsewhere(here: Path, run: Any) -> None:
    result = run("absent.py", "--json")
    error = result.json["error"]
    assert result.code == Exit.SOURCE and result.json["schema"] == 1
    assert set(error) == {"kind", "what", "why", "hint", "faults", "code"}
    assert error["faults"] == ["absent.py"] and error["code"] == Exit.SOURCE


# -- options --------------------------------------------------------------------------------------------------------


def test_select_and_ignore(here: Path, run: Any) -> None:
    code = SCRIPT.replace("FSDP(model)", "FSDP(model, limit_all_gathers=True)")
    (here / "train.py").write_text(code + "norm = model.clip_grad_norm_(1.0)\n")
    rules = {one["rule"] for one in run(".", "--json").json["findings"]}
    assert {"gradient-clipping", "retired-arguments", "wrap"} <= rules
    without = {one["rule"] for one in run(".", "--json", "--ignore", "gradient_clipping").json["findings"]}
    assert "gradient-clipping" not in without and "wrap" in without
    only = {one["rule"] for one in run(".", "--json", "--select", "gradient-clipping,wrap").json["findings"]}
    assert "gradient-clipping" in only and "retired-arguments" not in only


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_unknown_rule_is_a_usage_error_that_suggests_one(option: str, here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT)
    result = run(".", option, "gradient-cliping")
    assert result.code == Exit.USAGE and result.out == "" and list(result.error) == ["error", "why", "hint"]
    assert "'gradient-cliping'" in result.error["error"] and "gradient-clipping" in result.error["hint"]
    assert "--list-rules" in run(".", option, "xyzzy").error["hint"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("train.py", "--from", "fsdp3"), ("train.py", "--to", "ddp"), ("train.py", "--write", "--check")],
    ids=["no path", "unknown source", "unknown target", "write and check"],
)
def test_usage_errors(arguments: tuple[str, ...], here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT)
    result = run(*arguments)
    assert result.code == Exit.USAGE and list(result.error) == ["error", "why", "hint"]
    assert files(here) == {"train.py": SCRIPT.encode()}


@pytest.mark.parametrize(("source", "changes"), [("auto", True), ("fsdp1", True), ("ddp", False), ("deepspeed", False)])
def test_from_narrows_what_is_migrated(source: str, changes: bool, here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT)
    assert bool(run(".", "--from", source, "--to", "fsdp2").out) == changes


def test_every_listed_rule_has_a_page(here: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    listed = run("--list-rules")
    names = [line.split()[0] for line in listed.out.splitlines()]
    assert listed.code == 0 and len(names) > 40 and {"wrap", "accelerate-yaml", "launch-lines"} <= set(names)
    rows = run("--list-rules", "--json").json["rules"]
    assert [row["name"] for row in rows] == names and all(row["summary"] and row["sources"] for row in rows)
    explained = {one["name"] for one in ckptkit(capsys, "explain", "--json").json["names"] if "rule" in one["kind"]}
    assert explained == {*names, "leftover"}
    for name in ("wrap", "accelerate-yaml", "leftover", "GRADIENT_CLIPPING".lower()):
        page = ckptkit(capsys, "explain", name)
        assert page.code == 0 and "Known limits:" in page.out, name
    assert "did you mean wrap-policy?" in ckptkit(capsys, "explain", "wrap-polcy").err


# -- comments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# wrapped", "# ckptkit: skip"),
        ("# wrapped", "# ckptkit: skip - it is compared with"),
        ("model = FSDP", "# ckptkit: skip\nmodel = FSDP"),
        ("import torch.nn", "# ckptkit: skip-file\nimport torch.nn"),
    ],
)
def test_skip_comments(old: str, new: str, here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT.replace(old, new))
    result = run(".", "--check")
    assert (result.code, result.out) == (Exit.OK, "") and "0 would change" in result.err


def test_a_skipped_line_does_not_shield_the_next(here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT.replace("# wrapped", "# ckptkit: skip") + "other = FSDP(nn.Linear(3, 3))\n")
    run(".", "--write")
    text = (here / "train.py").read_text()
    assert "model = FSDP(model)  # ckptkit: skip" in text and "other = fully_shard(nn.Linear(3, 3))" in text
    compile(text, "train.py", "exec")


# -- files of every kind --------------------------------------------------------------------------------------------


def test_a_syntax_error_is_3_and_the_others_are_written(here: Path, run: Any) -> None:
    (here / "good.py").write_text(SCRIPT)
    (here / "bad.py").write_text(SCRIPT + "def broken(:\n")
    result = run(".", "--write")
    assert result.code == Exit.SOURCE and "bad.py:6: syntax error" in result.err
    assert files(here) == {"bad.py": (SCRIPT + "def broken(:\n").encode(), "good.py": AFTER.encode()}


@pytest.mark.parametrize(
    "data",
    [
        b"FullyShardedDataParallel\x00\xff\xfe\x80" * 9,
        SCRIPT.replace("two", "zw\u00f6lf").encode("latin-1"),
        b"# -*- coding: no-such-thing -*-\n" + SCRIPT.encode(),
        SCRIPT.replace("two", "zw\u00f6lf").encode("utf-16"),
        SCRIPT.encode() + b"x = '\x00'\n",
    ],
    ids=["binary", "latin-1 without cookie", "unknown cookie", "utf-16", "a NUL byte"],
)
def test_what_is_no_python_text_is_left_and_said(data: bytes, here: Path, run: Any) -> None:
    (here / "odd.py").write_bytes(data)
    (here / "train.py").write_text(SCRIPT)
    result = run(".", "--write")
    if b"FullyShardedDataParallel" in data:
        assert result.code == Exit.SOURCE and "odd.py: syntax error" in result.err.replace("odd.py:6:", "odd.py:")
    assert files(here) == {"odd.py": data, "train.py": AFTER.encode()}


@pytest.mark.parametrize(
    ("encoding", "cookie"), [("latin-1", "# -*- coding: latin-1 -*-\n"), ("utf-8", ""), ("utf-8-sig", "")]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_encodings_and_newlines_are_kept(encoding: str, cookie: str, newline: str, here: Path, run: Any) -> None:
    def spelled(text: str) -> bytes:
        return (cookie + text.replace("two", "zw\u00f6lf")).replace("\n", newline).encode(encoding)

    (here / "train.py").write_bytes(spelled(SCRIPT))
    assert run(".", "--write").code == Exit.OK
    assert files(here) == {"train.py": spelled(AFTER)}


def test_an_unreadable_file_is_3_and_the_others_are_written(
    here: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("locked.py", "train.py", "locked.yaml"):
        (here / name).write_text(SCRIPT)
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:  # root may read everything, whatever the mode
        if path.name.startswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        result = run(".", "--write")
    assert result.code == Exit.SOURCE and result.err.count("cannot be read: Permission denied") == 2
    assert (here / "train.py").read_text() == AFTER


def test_paths_that_do_not_exist_are_all_named_and_nothing_is_written(here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT)
    (here / "dangling.py").symlink_to("nowhere.py")
    result = run("train.py", "a.py", "dangling.py", "--write")
    assert result.code == Exit.SOURCE and list(result.error) == ["error", "why", "hint"]
    assert [line for line in result.err.splitlines() if line.startswith("  - ")] == ["  - a.py", "  - dangling.py"]
    assert (here / "train.py").read_text() == SCRIPT
    os.mkfifo(here / "pipe.py")
    assert run("pipe.py").code == Exit.SOURCE


def test_an_empty_directory_is_0_and_says_that_nothing_was_there(here: Path, run: Any) -> None:
    result = run(".")
    assert (result.code, result.out) == (Exit.OK, "") and "no Python file" in result.err
    assert run(".", "--json").json["files"] == []


def test_a_file_that_is_named_is_read_whatever_its_name(here: Path, run: Any) -> None:
    (here / ".hidden.py").write_text(SCRIPT)
    (here / "train").write_text(SCRIPT)
    assert run(".").out == ""
    assert run("train", ".hidden.py").out.count("+++ b/") == 2


@pytest.mark.parametrize("folder", [".git", ".venv", "venv", "node_modules", "__pycache__", "site-packages", "build"])
def test_environments_and_hidden_folders_are_not_looked_into(folder: str, here: Path, run: Any) -> None:
    (here / folder / "sub").mkdir(parents=True)
    for name in ("train.py", "args.json"):
        (here / folder / "sub" / name).write_text(SCRIPT)
    (here / "train.py").write_text(SCRIPT)
    run(".", "--write")
    assert (here / folder / "sub" / "train.py").read_text() == SCRIPT and (here / "train.py").read_text() == AFTER
    assert run(folder).out.count("+++ b/") == 1  # but when it is named


def test_the_same_file_by_two_names_is_one(here: Path, run: Any) -> None:
    (here / "train.py").write_text(SCRIPT)
    result = run("train.py", "./train.py", here / "train.py", ".", "--write")
    assert result.code == Exit.OK and "1 changed" in result.err


# -- writing --------------------------------------------------------------------------------------------------------


def test_a_link_stays_a_link_and_its_file_is_written_once(here: Path, run: Any, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(SCRIPT)
    (here / "outside.py").symlink_to(tmp_path / "outside.py")
    (here / "train.py").write_text(SCRIPT)
    (here / "link.py").symlink_to("train.py")
    (here / "loop").symlink_to(".", target_is_directory=True)
    result = run(".", "--write")
    assert result.code == Exit.OK and "2 changed" in result.err
    assert (here / "link.py").is_symlink() and (here / "outside.py").is_symlink()
    assert (tmp_path / "outside.py").read_text() == (here / "train.py").read_text() == AFTER


def test_a_read_only_file_stops_the_whole_run(here: Path, run: Any) -> None:
    (here / "a.py").write_text(SCRIPT)
    (here / "b.py").write_text(SCRIPT)
    (here / "c.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n")
    before = files(here)
    (here / "b.py").chmod(0o444)
    result = run(".", "--write")
    assert result.code == Exit.EXISTS and list(result.error) == ["error", "why", "hint"]
    assert "b.py is read-only" in result.err and files(here) == before
    assert run(".", "--check").code == Exit.FINDINGS  # reading it is no matter
    (here / "b.py").chmod(0o644)
    assert run(".", "--write").code == Exit.OK and files(here) != before


@pytest.mark.parametrize("step", ["stage", "rename"])
def test_a_failure_half_way_leaves_every_file_as_it_was(
    step: str, here: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the third file is staged, or the second rename fails."""
    for name in ("a.py", "b.py", "c.py"):
        (here / name).write_text(SCRIPT)
    before = files(here)
    done: list[object] = []
    name = {"stage": "fsync", "rename": "replace"}[step]
    real = getattr(os, name)

    def fails(*arguments: Any) -> Any:
        done.append(arguments)
        if len(done) == 2:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        result = run(".", "--write")
    assert result.code == Exit.EXISTS and "No space left on device" in result.err
    assert files(here) == before and len(done) >= 2
    assert run(".", "--write").code == Exit.OK and set(files(here).values()) == {AFTER.encode()}


def test_a_file_that_changed_meanwhile_is_not_overwritten(
    here: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "train.py").write_text(SCRIPT)
    engine = migrate.engine  # type: ignore[attr-defined]
    convert = engine._convert

    def edited_meanwhile(*arguments: Any) -> None:
        (here / "train.py").write_text(SCRIPT + "# edited\n")
        convert(*arguments)

    monkeypatch.setattr(engine, "_convert", edited_meanwhile)
    result = run(".", "--write")
    assert result.code == Exit.EXISTS and "has changed since it was read" in result.err
    assert files(here) == {"train.py": (SCRIPT + "# edited\n").encode()}


def test_a_bug_in_a_rule_is_101_and_leaves_its_file(here: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("by accident")

    (here / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(migrate.engine.shard, "write", broken)  # type: ignore[attr-defined]
    result = run(".", "--write")
    assert result.code == Exit.BUG and "rule wrap: ZeroDivisionError: by accident" in result.err
    assert files(here) == {"train.py": SCRIPT.encode()}


# -- notebooks ------------------------------------------------------------------------------------------------------


def notebook(*sources: str) -> str:
    cells = [{"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [],
              "source": source.splitlines(keepends=True)} for source in sources]  # fmt: skip
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}, indent=1) + "\n"


def test_a_notebook_is_reported_by_cell(here: Path, run: Any) -> None:
    (here / "train.ipynb").write_text(notebook("import torch.nn as nn", *SCRIPT.split("\n\n"), "class Mine(FSDP): ..."))
    result = run(".")
    assert result.code == Exit.FINDINGS and "train.ipynb:cell 3:2:9 exact wrap " in result.err
    assert "train.ipynb:cell 4:1:1 manual wrap " in result.err
    assert [line for line in result.out.splitlines() if line.startswith("+++")] == [
        f"+++ b/train.ipynb:cell {number}" for number in (2, 3, 4)
    ]
    cells = [one.get("cell") for one in run(".", "--json").json["findings"]]
    assert cells == sorted(cells) and {3, 4} <= set(cells)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (notebook(SCRIPT, "def broken(: # FSDP"), "cell 2: syntax error"),
        ('{"cells": [ FullyShardedDataParallel', "not a notebook"),
        ('{"FullyShardedDataParallel": 1}', "not a notebook"),
    ],
)
def test_a_broken_notebook_is_3_and_the_others_go_on(text: str, reason: str, here: Path, run: Any) -> None:
    (here / "bad.ipynb").write_text(text)
    (here / "train.py").write_text(SCRIPT)
    result = run(".", "--write")
    assert result.code == Exit.SOURCE and reason in result.err
    assert files(here) == {"bad.ipynb": text.encode(), "train.py": AFTER.encode()}
