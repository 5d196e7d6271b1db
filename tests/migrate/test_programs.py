"""Whole training programs in varied styles: a directory each, migrated as one program, run before and after.

Those that save and resume do so across the migration: the original trains to half way and saves, and the migrated
program goes on. It reads the original's files as they are, or, of DeepSpeed, what the `ckptkit convert` that migrate
names made of them. What it saves itself it resumes as well.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from ckptkit.cli.main import main
from harness import SCRIPTS, RunError, Runner
from test_pairs import assert_alike, largest_difference

from ckptkit import migrate

PROGRAMS = sorted(path.parent for path in (SCRIPTS.parent / "programs").glob("*/before"))
IDS = [program.name for program in PROGRAMS]
WORLD = {"spawn_gan": 1, "spawn_ema": 1}  # these start their ranks themselves
TIMEOUT = 180


def text(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.rglob("*.py")))


def bound(program: Path) -> float:
    found = re.search(r"^# bound: (\S+) ", (program / "before" / "train.py").read_text(), re.MULTILINE)
    return float(found.group(1)) if found else 1e-6


def is_deepspeed(program: Path) -> bool:
    return "deepspeed" in text(program / "before")


RESUMING = [program for program in PROGRAMS if re.search(r"\bresume\b", text(program / "before"))]


def run(runner: Runner, program: Path, side: str, cwd: Path, *args: str) -> dict:
    script = program / side / "train.py"
    return runner.run(script, cwd=cwd, world=WORLD.get(program.name, 2), timeout=TIMEOUT, args=args)


@pytest.mark.parametrize("program", PROGRAMS, ids=IDS)
def test_before_becomes_after(program: Path, tmp_path: Path) -> None:
    shutil.copytree(program / "before", tmp_path / "run", ignore=shutil.ignore_patterns("__pycache__"))
    report = migrate.run([tmp_path / "run"], write=True)
    assert not report.failed and not report.manual, (report.failed, report.manual)
    names = [{path.relative_to(top) for path in top.rglob("*.py")} for top in (tmp_path / "run", program / "after")]
    assert names[0] == names[1]
    for name in sorted(names[0]):
        assert (tmp_path / "run" / name).read_text() == (program / "after" / name).read_text(), name
    assert not migrate.run([tmp_path / "run"]).changed


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=IDS)
def test_both_train_alike(program: Path, runner: Runner, tmp_path: Path) -> None:
    records = []
    for side in ("before", "after"):
        (tmp_path / side).mkdir()
        records.append(run(runner, program, side, tmp_path / side))
    assert_alike(*records, bound(program))


def do_what_the_report_says(program: Path, folder: Path) -> None:
    """Run the commands that migrate names for the checkpoint `old` in a folder: one for DeepSpeed, else none."""
    commands = migrate.run([program / "before"]).commands
    assert len(commands) == is_deepspeed(program), commands
    for line in commands:
        program_name, *arguments = shlex.split(re.sub(r"\{[^}]*\}", str(folder / "old"), line))
        assert program_name == "ckptkit" and main(arguments) == 0


@pytest.mark.slow
@pytest.mark.parametrize("program", RESUMING, ids=[program.name for program in RESUMING])
def test_the_migrated_program_goes_on_where_the_original_stopped(program: Path, runner: Runner, tmp_path: Path) -> None:
    whole = run(runner, program, "before", tmp_path)
    first = run(runner, program, "before", tmp_path, "--save", "old")
    assert 0 < len(first["losses"]) < len(whole["losses"])
    do_what_the_report_says(program, tmp_path)
    rest = run(runner, program, "after", tmp_path, "--resume", "old")
    again = run(runner, program, "after", tmp_path, "--save", "new")
    last = run(runner, program, "after", tmp_path, "--resume", "new")
    for start, end in ((first, rest), (again, last)):
        for name, value in (("losses", start["losses"] + end["losses"]), ("weights", end["weights"])):
            difference = largest_difference(whole[name], value)
            assert difference <= bound(program), f"{name} differ by {difference:.3g}"


@pytest.mark.slow
def test_without_the_optimizers_state_the_losses_part(runner: Runner, tmp_path: Path) -> None:
    program = SCRIPTS.parent / "programs" / "resume"
    run(runner, program, "before", tmp_path, "--save", "old")
    rest = run(runner, program, "after", tmp_path, "--resume", "old")
    code = (program / "after" / "train.py").read_text()
    lost = code.replace("    set_optimizer_state_dict(", "    (lambda *a, **k: None)(")
    assert lost != code
    (tmp_path / "control.py").write_text(lost)
    control = runner.run(tmp_path / "control.py", cwd=tmp_path, args=("--resume", "old"))
    assert largest_difference(rest["losses"], control["losses"]) > 1e-4


@pytest.mark.slow
def test_steps_that_a_unit_of_fsdp1_shared_must_be_parted(runner: Runner, tmp_path: Path) -> None:
    program = SCRIPTS.parent / "programs" / "recipes"
    run(runner, program, "before", tmp_path, "--save", "old")
    rest = run(runner, program, "after", tmp_path, "--resume", "old")
    shutil.copytree(program / "after", tmp_path / "control", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "control" / "model_checkpointing" / "checkpoint_handler.py"
    code = path.read_text()
    path.write_text(code.replace("own_steps(optim_state)", "optim_state"))
    assert path.read_text() != code
    control = run(runner, tmp_path, "control", tmp_path, "--resume", "old")
    assert largest_difference(rest["weights"], control["weights"]) > 1e-3


@pytest.mark.slow
def test_an_optimizers_state_cannot_be_taken_of_what_an_evaluation_gathered(runner: Runner, tmp_path: Path) -> None:
    code = (SCRIPTS.parent / "programs" / "ddp_classic" / "after" / "train.py").read_text()
    bare = code.replace("resharded(model), optimizer", "model, optimizer")
    assert bare != code
    (tmp_path / "control.py").write_text(bare)
    with pytest.raises(RunError, match="KeyError: 0"):
        runner.run(tmp_path / "control.py", cwd=tmp_path, args=("--save", "new"))
