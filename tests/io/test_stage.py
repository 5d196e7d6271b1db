"""Staged output: whatever happens in the middle, nothing is left that looks complete, and the old one stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ckptkit.errors import ExistsError, TargetError, UsageError
from ckptkit.io.stage import check_target, staged


def fill(root: Path, text: str) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "data").write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with staged(target, is_file=False) as stage:
        fill(stage.root, "x")
        assert not target.exists() and stage.root.parent == target.parent
    assert contents(target.parent) == {"out/sub/data": "x"}


def test_a_file_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.pt"
    with staged(target, is_file=True) as stage:
        sink = stage.create("ignored")
        sink.write(b"abcd")
        sink.patch(1, b"X")
        sink.close()
        assert not target.exists()
    assert contents(tmp_path) == {"out.pt": "aXcd"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("is_file", [False, True])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: type[BaseException], old: bool, is_file: bool) -> None:
    target = tmp_path / "out"
    if old:
        target.mkdir()
        fill(target, "old")
    before = contents(tmp_path)
    with pytest.raises(error), staged(target, is_file=is_file, overwrite=old) as stage:
        if is_file:
            stage.create("x").write(b"half")
        else:
            fill(stage.root, "half")
        raise error
    assert contents(tmp_path) == before and (os.listdir(tmp_path) == (["out"] if old else []))


@pytest.mark.parametrize("was", ["folder", "file", "link"])
@pytest.mark.parametrize("becomes", ["folder", "file"])
def test_overwrite_keeps_the_old_one_until_the_new_one_is_whole(tmp_path: Path, was: str, becomes: str) -> None:
    target = tmp_path / "out"
    if was == "folder":
        target.mkdir()
        fill(target, "old")
    elif was == "file":
        target.write_text("old")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExistsError), staged(target, is_file=becomes == "file"):
        raise AssertionError("not entered")
    with staged(target, is_file=becomes == "file", overwrite=True) as stage:
        if becomes == "file":
            sink = stage.create("x")
            sink.write(b"new")
            sink.close()
        else:
            fill(stage.root, "new")
        assert os.path.lexists(target)
        assert was == "link" or "new" not in contents(tmp_path).get("out", "old")
    expected = {"out": "new"} if becomes == "file" else {"out/sub/data": "new"}
    assert contents(tmp_path) == expected
    assert not target.is_symlink() and (was != "link" or (tmp_path / "elsewhere").is_dir())


def test_kill_in_the_middle_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    script = tmp_path / "kill.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from pathlib import Path
            from ckptkit.io.stage import staged
            with staged(Path(sys.argv[1]), is_file=False, overwrite=True) as stage:
                sink = stage.create("a/b")
                sink.write(b"half")
                print("writing", flush=True)
                time.sleep(60)
            """
        )
    )
    target = tmp_path / "to" / "out"
    target.mkdir(parents=True)
    (target / "old").write_text("old")
    process = subprocess.Popen([sys.executable, str(script), str(target)], stdout=subprocess.PIPE, text=True,
                               cwd=Path(__file__).parents[2])  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert contents(target) == {"old": "old"}
    others = [name for name in os.listdir(target.parent) if name != "out"]
    assert len(others) == 1 and others[0].startswith(".out.ckptkit-partial-")
    with staged(target, is_file=False, overwrite=True) as stage:
        fill(stage.root, "new")
    assert contents(target) == {"sub/data": "new"}


@pytest.mark.parametrize(
    ("source", "target"),
    [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a/file", "a/file"), ("a/b/file", "a"), ("a", "link/x"), ("link", "a")],
)
def test_source_and_target_must_not_overlap(tmp_path: Path, source: str, target: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/file", "a/b/file"):
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match="overlap"):
        check_target(tmp_path / target, overwrite=True, sources=(tmp_path / source,))


def test_a_target_beside_its_source_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("")
    check_target(tmp_path / "a" / "other", overwrite=False, sources=(tmp_path / "a" / "file",))
    check_target(tmp_path / "ab", overwrite=False, sources=(tmp_path / "a",))


def test_a_target_that_cannot_be_written_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError) as caught, staged(tmp_path / "file" / "out", is_file=False):
        pass
    assert caught.value.why and caught.value.hint


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TargetError) as caught, staged(tmp_path / "out", is_file=False) as stage:
        fill(stage.root, "half")
        raise OSError(28, "No space left on device")
    assert "No space left" in caught.value.why and os.listdir(tmp_path) == []


def test_writing_is_synced_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1])
    with staged(tmp_path / "out", is_file=False) as stage:
        sink = stage.create("a/b")
        sink.write(b"x")
        sink.close()
    assert calls[0] == "fsync" and calls[-1] == "fsync" and calls.index("rename") >= 3


@pytest.mark.parametrize("is_file", [True, False])
def test_what_another_run_wrote_meanwhile_is_not_replaced(tmp_path: Path, is_file: bool) -> None:
    target = tmp_path / "out"
    with pytest.raises(ExistsError), staged(target, is_file=is_file) as stage:
        stage.create("a").close()
        target.write_bytes(b"of another run")
    assert target.read_bytes() == b"of another run" and list(tmp_path.iterdir()) == [target]
