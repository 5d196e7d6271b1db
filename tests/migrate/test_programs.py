"""Whole training programs in varied styles: a directory each, migrated as one program, run before and after."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from harness import SCRIPTS, Runner
from test_pairs import assert_alike, largest_difference

from ckptkit import migrate

PROGRAMS = sorted(path.parent for path in (SCRIPTS.parent / "programs").glob("*/before"))
IDS = [program.name for program in PROGRAMS]
WORLD = {"spawn_gan": 1}  # this one starts its ranks itself


@pytest.mark.parametrize("program", PROGRAMS, ids=IDS)
def test_before_becomes_after(program: Path, tmp_path: Path) -> None:
    shutil.copytree(program / "before", tmp_path / "run", ignore=shutil.ignore_patterns("__pycache__"))
    report = migrate.run([tmp_path / "run"], write=True)
    assert not report.failed and not report.manual, (report.failed, report.manual)
    for after in (program / "after").glob("*.py"):
        assert (tmp_path / "run" / after.name).read_text() == after.read_text(), after.name
    assert not migrate.run([tmp_path / "run"]).changed


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=IDS)
def test_both_train_alike(program: Path, runner: Runner, tmp_path: Path) -> None:
    bound = re.search(r"^# bound: (\S+) ", (program / "before" / "train.py").read_text(), re.MULTILINE)
    records = []
    for side in ("before", "after"):
        (tmp_path / side).mkdir()
        world = WORLD.get(program.name, 2)
        records.append(runner.run(program / side / "train.py", cwd=tmp_path / side, world=world, timeout=120))
    assert_alike(*records, float(bound.group(1)) if bound else 1e-6)


@pytest.mark.slow
def test_the_migrated_program_resumes_from_a_checkpoint_of_the_original(runner: Runner, tmp_path: Path) -> None:
    before, after = (SCRIPTS.parent / "programs" / "resume" / side / "train.py" for side in ("before", "after"))
    whole = runner.run(before, cwd=tmp_path)
    first = runner.run(before, cwd=tmp_path, args=("--save", "old.pt"))
    rest = runner.run(after, cwd=tmp_path, args=("--resume", "old.pt"))
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert largest_difference(whole["weights"], rest["weights"]) == 0.0
    # The control: without the optimizer's state the losses part.
    code = after.read_text().replace("    set_optimizer_state_dict(", "    (lambda *a, **k: None)(")
    (tmp_path / "control.py").write_text(code)
    lost = runner.run(tmp_path / "control.py", cwd=tmp_path, args=("--resume", "old.pt"))
    assert largest_difference(rest["losses"], lost["losses"]) > 1e-4
