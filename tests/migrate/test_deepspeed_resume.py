"""A DeepSpeed run goes on in the migrated program: its checkpoint, the convert line of the report, equal losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS, RunError, Runner
from test_pairs import largest_difference

from ckptkit import migrate

pytestmark = pytest.mark.slow
BEFORE = (SCRIPTS.parent / "programs" / "deepspeed_resume" / "before" / "train.py").read_text()
SGD = '{"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}, "zero_allow_untested_optimizer": True'
FALLING = 'True, "initial_scale_power": 18'
LOW = '"zero_optimization": {{"stage": {}}}, "{}": {{"enabled": True}}'

# What is changed in the program, and the bound: DeepSpeed's Adam rounds otherwise in the last bits, torch's not.
VARIANTS: dict[str, tuple[dict[str, str], float]] = {
    "stage 0": ({'"stage": 2': '"stage": 0'}, 1e-5),
    "stage 1": ({'"stage": 2': '"stage": 1'}, 1e-5),
    "stage 2": ({}, 1e-5),
    "stage 3": ({'"stage": 2': '"stage": 3'}, 1e-5),
    "torch's SGD": ({'{"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}': SGD}, 1e-6),
    "bf16": (
        {'"zero_optimization": {"stage": 2}': LOW.format(2, "bf16"), "x.to(engine.device)": "x.bfloat16()"},
        1e-3,  # the losses are those of a bf16 forward
    ),
    "fp16, its loss scale falling": (
        {
            '"zero_optimization": {"stage": 2}': LOW.format(2, "fp16").replace("True", FALLING),
            "x.to(engine.device)": "x.half()",
        },
        1e-3,  # and of an fp16 forward
    ),
}  # fmt: skip


def old_and_new(folder: Path, changes: dict[str, str]) -> tuple[Path, Path, str]:
    """(original, migrated program, the convert line of the report)."""
    text = BEFORE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    paths = []
    for name in ("old", "new"):
        (folder / name).mkdir()
        paths.append(folder / name / "train.py")
        paths[-1].write_text(text)
    report = migrate.run([paths[1]], write=True)
    assert not report.manual and len(report.commands) == 1
    return (*paths, report.commands[0])


def convert(line: str, folder: Path) -> None:
    program, *arguments = line.replace("{args.resume}", "out").split()
    assert program == "ckptkit"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "ckptkit", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("changes", "bound"), VARIANTS.values(), ids=VARIANTS)
def test_a_run_goes_on_where_it_stopped(changes: dict[str, str], bound: float, runner: Runner, tmp_path: Path) -> None:
    old, new, line = old_and_new(tmp_path, changes)
    whole = runner.run(old, cwd=tmp_path)
    first = runner.run(old, cwd=tmp_path, args=("--save", "out"))
    convert(line, tmp_path)
    rest = runner.run(new, cwd=tmp_path, args=("--resume", "out"))
    assert largest_difference(whole["losses"], first["losses"] + rest["losses"]) <= bound
    assert largest_difference(whole["weights"], rest["weights"]) <= bound
    for name in ("steps", "rate", "best", "order"):
        assert rest[name] == whole[name], name


LOST = {
    "the moments": ("optim_state_dict=moments", "optim_state_dict=get_state_dict(model, optimizer)[1]"),
    "the schedule": ("    if scheduler is not None and schedule:", "    if False:"),
    "the weights": ("model_state_dict=weights", "model_state_dict={k: v * 1.01 for k, v in weights.items()}"),
}


def test_what_is_left_out_of_a_resumed_run_is_seen(runner: Runner, tmp_path: Path) -> None:
    old, new, line = old_and_new(tmp_path, {})
    whole = runner.run(old, cwd=tmp_path)
    runner.run(old, cwd=tmp_path, args=("--save", "out"))
    with pytest.raises(RunError, match=r"run: ckptkit convert out out.fsdp2 --to dcp"):
        runner.run(new, cwd=tmp_path, args=("--resume", "out"))  # it never starts from nothing
    convert(line, tmp_path)
    for old_text, new_text in LOST.values():
        control = tmp_path / "control.py"
        control.write_text(new.read_text().replace(old_text, new_text))
        assert control.read_text() != new.read_text()
        lost = runner.run(control, cwd=tmp_path, args=("--resume", "out"))
        assert largest_difference(whole["losses"][4:], lost["losses"]) > 1e-4


def test_checkpoints_of_the_migrated_program_itself_go_on(runner: Runner, tmp_path: Path) -> None:
    _, new, _ = old_and_new(tmp_path, {})
    whole = runner.run(new, cwd=tmp_path)
    first = runner.run(new, cwd=tmp_path, args=("--save", "out"))
    rest = runner.run(new, cwd=tmp_path, args=("--resume", "out"))
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert all(rest[name] == whole[name] for name in ("steps", "rate", "best", "order", "weights"))
