"""Code mode: the old and the new training script side by side, with no change to either."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import SourceError, UsageError
from .report import Finding, Report, judge, versions
from .script_detect import detect_launch
from .script_launch import Launched, Script, run_script
from .tolerance import Tolerance, tolerance_for
from .trace import Trace

CONFIGS = {".json", ".yaml", ".yml", ".toml", ".ini", ".cfg"}
LARGEST_CONFIG = 1 << 20  # bytes; what is larger is data


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """How to run both scripts. `device` "cpu" answers calls for CUDA and NCCL with CPU and gloo; "cuda" leaves them;
    "auto" is "cuda" where there is a GPU. `tolerance` None takes the measured one of `precision`."""

    args: tuple[str, ...] = ()
    launch: Literal["auto", "torchrun", "spawn"] = "auto"
    world_size: int = 2
    steps: int = 10
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: str | None = None
    tolerance: float | None = None
    seed: int = 0
    timeout: float = 600.0


Rewrite = Callable[[Path], str]


def verify_scripts(
    old: Path,
    new: Path | None,
    options: ScriptOptions,
    *,
    rewrite: Rewrite | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Runs `old` and `new` and compares the losses of every rank.

    Without `new` it is a copy of `old` that `rewrite` changes in place, answering a sentence about what it did; the
    copy still finds the modules beside `old`.

    Raises SourceError if a script is missing or not Python, UsageError for options that cannot be.
    """
    if options.steps < 1 or options.world_size < 1:
        raise UsageError("--steps and --world-size must be at least 1")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptkit-migrated-") as folder:
        notes = []
        python_path: tuple[str, ...] = ()
        if new is None:
            new, note = _rewritten(old, Path(folder), rewrite)
            notes.append(note)
            python_path = (str(old.resolve().parent),)
        before, after, more = _run_both(old, new, python_path, options, progress)
    notes += more
    for label, launched in (("old", before), ("new", after)):
        if "weights" in launched.notes:
            notes.append(f"{label}: weights {launched.notes['weights']}")
    tolerance = tolerance_for(options.precision or _precision(before, after), options.tolerance)
    findings = tuple(_judged(before, after, tolerance))
    environment = {**versions(), **dict(after.traces[0].environment), "steps": str(options.steps)}
    title = f"{old.name} against {'its migration' if python_path else new.name}"
    return Report("code", title, findings, environment, tuple(notes), time.monotonic() - began)


def _run_both(
    old: Path, new: Path, python_path: tuple[str, ...], options: ScriptOptions, progress: Callable[[str], None]
) -> tuple[Launched, Launched, list[str]]:
    before_script = replace(_script(old, "old", options), stop_if_ranks_differ=True)
    after_script = replace(_script(new, "new", options),
                           python_path=python_path)  # fmt: skip
    launches = [(old, before_script.launch), (new, after_script.launch)]
    notes = list(dict.fromkeys(f"{path.name}: launch {how} ({_why(path, options)})" for path, how in launches))
    progress(f"running {old.name}")
    before = run_script(before_script)
    if before.notes.get("ranks_went_apart") == "yes":
        notes.append(
            f"{old.name} neither seeds its ranks alike nor broadcasts rank 0's weights, so each rank trains shards of "
            "another random model; both scripts were run with one seed for the weights of all ranks. If the weights "
            "are not loaded from a checkpoint afterwards, this is a fault of the original"
        )
        before_script, after_script = (
            replace(s, seed_ranks="same", stop_if_ranks_differ=False) for s in (before_script, after_script)
        )
        before = run_script(before_script)
    progress(f"running {new.name}")
    return before, run_script(after_script), notes


def _script(path: Path, label: str, options: ScriptOptions) -> Script:
    launch = detect_launch(path)[0] if options.launch == "auto" else options.launch
    return Script(
        path.resolve(), options.args, launch, options.world_size, options.steps, resolve_device(options.device),
        options.seed, timeout=options.timeout, label=label,
    )  # fmt: skip


def _why(path: Path, options: ScriptOptions) -> str:
    return detect_launch(path)[1] if options.launch == "auto" else "--launch"


def resolve_device(device: str) -> str:
    """ "auto" as "cuda" or "cpu"."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _judged(before: Launched, after: Launched, tolerance: Tolerance) -> list[Finding]:
    """Rank by rank: ranks see their own data, so their losses differ from each other and not between the scripts."""
    if not before.complete or not after.complete or len(before.traces) != len(after.traces):
        return [judge(_worst(before), _worst(after, before), tolerance)]
    return [judge(ours, theirs, tolerance) for ours, theirs in zip(before.traces, after.traces, strict=True)]


def _worst(launched: Launched, other: Launched | None = None) -> Trace:
    failed = next((trace for trace in launched.traces if trace.status != "ran"), None)
    if failed is not None:
        return failed
    first = launched.traces[0]
    if other is not None and other.complete and len(other.traces) != len(launched.traces):
        reason = f"{len(launched.traces)} ranks trained, and {len(other.traces)} in the other script"
        return replace(first, status="failed", reason=reason)
    return first


def _precision(*launches: Launched) -> str:
    """bf16 or fp16 where the recorder saw the model compute in it."""
    for launched in launches:
        seen = launched.notes.get("compute_dtype", "")
        if seen in ("bf16", "fp16"):
            return seen
    return "fp32"


def _rewritten(old: Path, folder: Path, rewrite: Rewrite | None) -> tuple[Path, str]:
    """A rewritten copy of the script, in a folder of its own; the original stays as it is.

    Configuration goes along, because what a DeepSpeed script does stands in a file beside it or one folder below.
    """
    if rewrite is None:
        raise UsageError("there is no second script", hint="name the new script, or give a `rewrite`")
    if not old.exists():
        raise SourceError(f"{old} does not exist")
    copy = folder / old.name
    copy.write_bytes(old.read_bytes())
    home = old.resolve().parent
    for path in (*home.glob("*.*"), *home.glob("*/*.*")):
        if path.suffix.lower() in CONFIGS and path.is_file() and path.stat().st_size <= LARGEST_CONFIG:
            target = folder / path.relative_to(home)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
    return copy, rewrite(copy)


def split_arguments(given: Sequence[str]) -> tuple[Path, Path | None, tuple[str, ...]]:
    """The old script, the new one if the second word is a Python file too, and the words that both scripts get.

    Raises UsageError if the first word is no Python file.
    """
    if not given or not given[0].endswith(".py"):
        raise UsageError(
            f"{given[0] if given else 'nothing'} is no Python script", hint="verify OLD.py [NEW.py] [-- ARGS]"
        )
    if len(given) > 1 and given[1].endswith(".py"):
        return Path(given[0]), Path(given[1]), tuple(given[2:])
    return Path(given[0]), None, tuple(given[1:])
