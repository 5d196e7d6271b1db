"""Launches a training script as it wants to be launched, watched by the recorder, and reads what the recorder wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import script_hook
from .deepspeed_ops import COMM, build_ops
from .script_detect import Launch
from .trace import StepRecord, Summaries, Trace, step_from_json, summaries_from_json

GRACE_SECONDS = 5.0  # how long the others may go on after one process failed
TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class Script:
    """A script and how to run it. `label` names it in reports; `python_path` is searched for its modules as well."""

    path: Path
    args: tuple[str, ...]
    launch: Launch
    world_size: int
    steps: int
    device: str = "auto"
    seed: int = 0
    seed_ranks: str = "apart"
    timeout: float = 600.0
    label: str = ""
    python_path: tuple[str, ...] = ()
    stop_if_ranks_differ: bool = False  # after the first step: the caller will want another seed


@dataclass(frozen=True, slots=True)
class Launched:
    """What one launch left: traces by rank, the output, and the exit code of the worst process."""

    traces: tuple[Trace, ...]
    output: str
    exit_code: int
    notes: Mapping[str, str]

    @property
    def complete(self) -> bool:
        return bool(self.traces) and all(trace.status == "ran" for trace in self.traces)


def run_script(script: Script) -> Launched:
    """Runs it until every rank has made its steps, and once more if it failed without a Python traceback.

    Some gloo processes abort at exit, or in a race at start, about one launch in fifty; a launch is therefore judged by
    what it computed and not by its exit code.
    """
    if script.device == "cpu" and _uses_deepspeed(script):
        build_ops(COMM)
    first = _launch(script)
    if first.complete or "Traceback (most recent call last)" in first.output:
        return first
    second = _launch(script)
    return second if second.complete or not first.traces else first


def _uses_deepspeed(script: Script) -> bool:
    beside = (path.read_bytes() for path in script.path.parent.glob("*.py"))
    return any(b"import deepspeed" in code or b"from deepspeed" in code for code in beside)


def _launch(script: Script) -> Launched:
    with tempfile.TemporaryDirectory(prefix="ckptkit-verify-") as folder:
        home = Path(folder)
        records, site = home / "records", home / "site"
        records.mkdir()
        site.mkdir()
        (site / "sitecustomize.py").write_text(script_hook.SITE_CUSTOMIZE, encoding="utf-8")
        output = home / "output.txt"
        with output.open("wb") as file:
            code, ended = _run(script, _environment(script, records, site), file, records)
        text = output.read_text(encoding="utf-8", errors="replace")
        return _collect(script, records, text, code, ended)


def _environment(script: Script, records: Path, site: Path) -> dict[str, str]:
    own = {
        script_hook.FOLDER: str(records),
        "CKPTKIT_VERIFY_STEPS": str(script.steps),
        "CKPTKIT_VERIFY_SEED": str(script.seed),
        "CKPTKIT_VERIFY_SEED_RANKS": script.seed_ranks,
        "CKPTKIT_VERIFY_DEVICE": script.device,
        "CKPTKIT_VERIFY_WORLD": str(script.world_size),
        "CKPTKIT_VERIFY_PORT": str(_free_port()),
        "CKPTKIT_VERIFY_STOP_IF_RANKS_DIFFER": "1" if script.stop_if_ranks_differ else "",
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    environment = {**os.environ, **own}
    path = [str(site), *script.python_path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    environment.setdefault("OMP_NUM_THREADS", "1")
    if script.device == "cpu":
        environment.update({"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        environment.pop(name, None)
    return environment


def _run(script: Script, environment: dict[str, str], output: object, records: Path) -> tuple[int, str]:
    """The worst exit code and why it was ended, if it was."""
    command = [sys.executable, str(script.path), *script.args]
    processes = []
    for each in _ranks(script, environment):
        processes.append(
            subprocess.Popen(command, env=each, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)  # type: ignore[call-overload]
        )
    try:
        ended = _wait(processes, script.timeout, records)
    finally:
        for process in processes:
            _end(process)
    codes = [process.returncode for process in processes]
    return next((code for code in codes if code not in (0, -signal.SIGKILL)), 0), ended


def _ranks(script: Script, environment: dict[str, str]) -> list[dict[str, str]]:
    """The environment of each process to start: one that makes its own ranks, or one a rank, as torchrun sets it."""
    if script.launch == "spawn":
        return [environment]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": environment["CKPTKIT_VERIFY_PORT"],
        "WORLD_SIZE": str(script.world_size),
        "LOCAL_WORLD_SIZE": str(script.world_size),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "TORCHELASTIC_RUN_ID": "ckptkit",
    }
    ranks = range(script.world_size)
    return [{**environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks]


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float, records: Path) -> str:
    """Waits for all. When one fails, the others get a few seconds, because they may wait for it forever; so does a
    parent whose ranks are done, because it may go on with something long."""
    until = time.monotonic() + timeout
    leaving = False
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() not in (None, 0) for process in processes)
        if not leaving and (failed or _all_done(records)):
            leaving, until = True, min(until, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > until:
            return "" if leaving else f"timed out after {timeout:g} s"
        time.sleep(0.05)
    return ""


def _all_done(records: Path) -> bool:
    """Whether every rank that recorded steps has made all of them."""
    started, done = len(list(records.glob("rank*.steps.jsonl"))), len(list(records.glob("rank*.done")))
    return started > 0 and started == done


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a process and its children (its own session), and takes its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _collect(script: Script, records: Path, output: str, code: int, ended: str) -> Launched:
    ranks = sorted({int(path.name.split(".")[0].removeprefix("rank")) for path in records.glob("rank*.steps.jsonl")})
    notes = _json(records / "rank0.notes.json", {})
    label = script.label or script.path.name
    if not ranks:
        reason = ended or ("no optimizer step followed a backward pass" if code == 0 else f"exit code {code}")
        failed = Trace.failed(label, str(script.path), _with_tail(reason, output), world_size=script.world_size)
        return Launched((failed,), output, code, notes)
    traces = []
    for rank in ranks:
        steps = _steps(records / f"rank{rank}.steps.jsonl")
        trace = Trace(
            label=f"{label} rank {rank}", strategy=str(script.path), world_size=max(len(ranks), 1), precision="",
            steps=steps, groups=_json(records / "rank0.groups.json", {}), environment=_environment_notes(script, notes),
            initial=_summaries(records, "initial"), after_first=_summaries(records, "after_first"),
            final=_summaries(records, "final"), optimizer_first=_summaries(records, "optimizer_first"),
        )  # fmt: skip
        # A script may end before its N steps (little data); one that fails on the way has not.
        if len(steps) < script.steps and (code != 0 or ended):
            reason = _with_tail(f"{ended or f'exit code {code}'} after {len(steps)} of {script.steps} steps", output)
            trace = replace(trace, status="failed", reason=reason)
        traces.append(trace)
    return Launched(tuple(traces), output, code, notes)


def _steps(path: Path) -> tuple[StepRecord, ...]:
    return tuple(step_from_json(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


def _summaries(records: Path, name: str) -> Summaries:
    return summaries_from_json(_json(records / f"rank0.{name}.json", {}))


def _json(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    """What a recorder wrote; nothing where it wrote none or was killed while writing."""
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return default
    return loaded


def _environment_notes(script: Script, notes: Mapping[str, str]) -> dict[str, str]:
    return {
        "launch": script.launch,
        "device": script.device,
        "world size": str(script.world_size),
        "seed": f"{script.seed} ({'one for all ranks' if script.seed_ranks == 'same' else 'plus the rank'})",
        **{key: value for key, value in notes.items() if key not in ("looked", "parted")},
    }


def _with_tail(reason: str, output: str) -> str:
    """The reason and the last traceback of the output, or its last lines."""
    lines = output.strip().splitlines()
    start = next((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), None)
    tail = lines[start : start + TAIL_LINES] if start is not None else lines[-TAIL_LINES:]
    return "\n".join([reason, *tail])


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port
