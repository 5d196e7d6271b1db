"""Scripts that ask for CUDA and NCCL are run unchanged on CPU, stopped, compared; planted faults are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ckptkit.cli.verify import migrate_copy

from ckptkit.errors import Exit, SourceError, UsageError
from ckptkit.verify.report import judge
from ckptkit.verify.script import ScriptOptions, split_arguments, verify_scripts
from ckptkit.verify.script_detect import detect_launch
from ckptkit.verify.script_launch import Script, run_script
from ckptkit.verify.tolerance import FP32

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 5


def run(path: Path, **changes):
    options = {"steps": STEPS, "device": "cpu", "timeout": 180.0, "label": path.stem} | changes
    return run_script(Script(path, (), detect_launch(path)[0], 2, **options))


@pytest.fixture(scope="module")
def right():
    launched = run(SCRIPTS / "fsdp2.py")
    assert launched.complete, launched.traces[0].reason
    return launched


@pytest.mark.slow
def test_every_rank_and_step_is_recorded_and_the_script_is_stopped(right):
    assert [trace.label for trace in right.traces] == ["fsdp2 rank 0", "fsdp2 rank 1"]
    assert all(len(trace.steps) == STEPS for trace in right.traces)
    assert right.traces[0].losses != right.traces[1].losses  # ranks see data of their own
    first = right.traces[0].steps[1]
    assert first.lrs == (1e-2,) and first.applied_norm <= 0.4001 and first.grad_norm >= first.applied_norm
    assert set(right.traces[0].initial) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert right.traces[0].final.keys() == right.traces[0].initial.keys()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ddp_spawn", "deepspeed_zero"])
def test_other_dialects_compute_the_same(right, script):
    if script == "deepspeed_zero":
        pytest.importorskip("deepspeed")
    launched = run(SCRIPTS / f"{script}.py")
    assert launched.complete, launched.traces[0].reason
    for ours, theirs in zip(right.traces, launched.traces, strict=True):
        finding = judge(theirs, ours, FP32)
        assert finding.comparison.verdict == "equal", (finding.diagnosis, finding.comparison.first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("no broadcast", "no rank-0 broadcast"),
        ("optimizer first", "optimizer created before sharding"),
        ("no division", "gradient scale"),
        ("no clip", "clipping missing"),
        ("no decay", "group hyper-parameters"),
        ("other data", "data order"),
    ],
)
def test_a_hand_broken_migration_is_caught_and_named(right, tmp_path, fault, cause):
    launched = run(broken(tmp_path, fault))
    findings = [judge(ours, theirs, FP32) for ours, theirs in zip(right.traces, launched.traces, strict=True)]
    assert all(f.comparison.verdict == "mismatch" for f in findings)
    assert [f.diagnosis.cause for f in findings] == [cause, cause]


@pytest.mark.slow
def test_a_crash_is_reported_with_its_traceback_and_does_not_hang(right, tmp_path):
    launched = run(broken(tmp_path, "crash"))
    assert not launched.complete
    reason = launched.traces[0].reason
    assert "2 of 5 steps" in reason and "RuntimeError: the planted crash" in reason
    assert judge(right.traces[0], launched.traces[0], FP32).comparison.verdict == "failed"


@pytest.mark.slow
def test_a_tutorial_script_is_migrated_and_equal(tmp_path):
    script = Path(shutil.copy(SCRIPTS / "fsdp1.py", tmp_path))
    before = script.read_bytes()
    report = verify_scripts(script, None, ScriptOptions(steps=4, device="cpu", timeout=180), rewrite=migrate_copy)
    assert report.ok and report.exit_code == Exit.OK, report.findings
    assert script.read_bytes() == before
    assert any("neither seeds its ranks alike" in note for note in report.notes)
    assert report.findings[0].comparison.tolerance.name == "bf16"
    assert len(report.findings) == 2 and all(f.comparison.candidate.final for f in report.findings)


def broken(folder: Path, fault: str) -> Path:
    text = (SCRIPTS / "fsdp2.py").read_text()
    assert 'FAULT = ""' in text
    path = folder / "broken.py"
    path.write_text(text.replace('FAULT = ""', f'FAULT = "{fault}"'))
    return path


def test_a_script_that_hangs_is_ended(tmp_path):
    path = tmp_path / "hang.py"
    path.write_text("import time\nprint('before')\ntime.sleep(600)\n")
    launched = run(path, timeout=1.5)
    assert not launched.complete and "timed out after 1.5 s" in launched.traces[0].reason


def test_a_script_that_does_not_train_is_a_failure(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("print('hello')\n")
    launched = run(path)
    assert launched.exit_code == 0 and launched.traces[0].status == "failed"
    assert "no optimizer step" in launched.traces[0].reason


def test_the_hidden_sitecustomize_still_runs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'\n")
    path = tmp_path / "script.py"
    path.write_text("import os, sys; print('seen', os.environ.get('SEEN')); sys.exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launched = run(path)
    assert "seen yes" in launched.output and "exit code 3" in launched.traces[0].reason


@pytest.mark.parametrize(
    ("text", "launch"),
    [
        ("import os\nrank = int(os.environ['RANK'])\n", "torchrun"),
        ("import os\nrank = os.environ.get('LOCAL_RANK', 0)\nmp.spawn(f)\n", "torchrun"),
        ("import os\nrank = os.getenv('WORLD_SIZE')\n", "torchrun"),
        ("import os\nos.environ['RANK'] = '0'\nmp.spawn(f)\n", "spawn"),
        ("# mp.spawn(f) in a comment\nprint('mp.spawn')\n", "torchrun"),
        ("import multiprocessing as mp\nmp.Process(target=f).start()\n", "spawn"),
        ("import deepspeed\ndeepspeed.init_distributed()\n", "torchrun"),
    ],
)
def test_the_launch_is_read_from_the_code(tmp_path, text, launch):
    path = tmp_path / "script.py"
    path.write_text(text)
    assert detect_launch(path)[0] == launch


def test_what_is_no_script_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        verify_scripts(tmp_path / "none.py", None, ScriptOptions(), rewrite=migrate_copy)
    (tmp_path / "bad.py").write_text("def (:")
    with pytest.raises(SourceError, match="not a Python script"):
        verify_scripts(tmp_path / "bad.py", tmp_path / "bad.py", ScriptOptions())
    with pytest.raises(UsageError):
        verify_scripts(tmp_path / "bad.py", None, ScriptOptions(steps=0))


def test_words_after_the_scripts_are_for_the_scripts():
    assert split_arguments(["a.py", "b.py", "--epochs", "3"]) == (Path("a.py"), Path("b.py"), ("--epochs", "3"))
    assert split_arguments(["a.py", "--config", "b.json"]) == (Path("a.py"), None, ("--config", "b.json"))
    with pytest.raises(UsageError):
        split_arguments(["train"])
