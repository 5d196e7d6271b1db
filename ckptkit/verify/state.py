"""State form: resumes a checkpoint in its own strategy and its conversion in another, and compares the next steps."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import CkptkitError, UsageError
from ..opened import OpenCheckpoint
from .matrix import default_ranks, device_notes, workload_of
from .options import MatrixOptions
from .pool import JobError, Pool
from .report import Report, judge, versions
from .resume import Resumed, resume
from .runner import prepare
from .script import resolve_device
from .strategies import Options, get_strategy
from .tolerance import tolerance_for
from .trace import Trace
from .workload import Workload

# Which strategy resumes a format when nobody says, and the forms of its checkpoints that the format can be.
OWN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "full": ("ddp", ("full", "full-bare")),
    "dcp": ("fsdp2", ("dcp", "dcp-flat")),
    "rank_files": ("fsdp2", ("ranks",)),
    "zero": ("zero2", ("native",)),
    "universal": ("zero2", ("universal",)),
    "safetensors": ("fsdp2", ()),
}


@dataclass(frozen=True, slots=True)
class _Side:
    """One checkpoint and who resumes it."""

    label: str
    path: Path
    strategy: str
    forms: tuple[str, ...]
    world_size: int
    found: tuple[str, ...] = field(default=())


def verify_state(
    source: Path,
    converted: Path | None,
    options: MatrixOptions,
    *,
    to: str = "fsdp2",
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Resumes `source`, and `converted` (without it, what `convert` makes of `source`) in the strategy `to`, and
    compares losses, norms, weights and optimizer states of the next steps.

    `options.strategies` may name the one strategy that resumes the source. What the options leave open is read from the
    source: precision from its masters, optimizer from its states, world size from its files.

    Raises SourceError for what cannot be opened, UsageError for strategies that cannot be, and what `convert` raises.
    """
    import ckptkit

    began = time.monotonic()
    if len(options.strategies) > 1:
        raise UsageError("a checkpoint is resumed in one strategy", hint="--strategies SRC's, --to DST's")
    device = resolve_device(options.device)
    workload = workload_of(options.model, options.batch)
    opened = ckptkit.open(source, model=workload.model)
    ranks = options.world_size or default_ranks(device)
    own = opened.world_size or ranks
    before = _side("source", source, opened, options.strategies, ranks if opened.format == "full" else own)
    precision = options.precisions[0] if options.precisions else _precision(opened)
    how = Options(
        precision=precision, optimizer=options.optimizers[0] if options.optimizers else _optimizer(opened),
        clip=options.clip or None, accumulate=options.accumulate, seed=options.seed, device=device,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ckptkit-verify-") as folder:
        notes = [f"source: {opened.format}, {'; '.join(opened.evidence)}"]
        if converted is None:
            progress(f"converting {source.name}")
            converted = _convert(source, Path(folder), to, ranks, workload)
            notes.append(f"converted to {to} for {ranks} ranks in a temporary folder")
        target = ckptkit.open(converted, model=workload.model)
        after = _side("converted", converted, target, (to,), ranks)
        prepare((before.strategy, after.strategy), device)
        with Pool(max(before.world_size, after.world_size), device=device) as pool:
            progress(f"{source.name} in {before.strategy}")
            reference, first = _run(pool, before, workload, how, options.steps)
            progress(f"{converted.name} in {after.strategy}")
            candidate, second = _run(pool, after, workload, how, options.steps)
    notes += [line for line in (first, second) if line]
    finding = judge(reference, candidate, tolerance_for(precision, options.tolerance))
    facts = {**versions(), "device": device, "world size": f"{before.world_size} and {after.world_size}",
             "steps": str(options.steps), "precision": precision, "optimizer": how.optimizer}  # fmt: skip
    title = f"{source.name} resumed in {before.strategy} and converted to {after.strategy}"
    notes += device_notes(device, after.world_size)
    return Report("state", title, (finding,), facts, tuple(notes), time.monotonic() - began)


def _side(label: str, path: Path, opened: OpenCheckpoint, named: tuple[str, ...], ranks: int) -> _Side:
    strategy, forms = OWN.get(opened.format, ("fsdp2", ()))
    stage = next((match[1] for line in opened.evidence if (match := re.search(r"ZeRO-(\d)", line))), None)
    if strategy.startswith("zero") and stage is not None:
        strategy = f"zero{stage}"
    if named and named[0] != strategy:
        strategy = named[0]
        known = get_strategy(strategy).forms
        forms = tuple(form for form in known if form in forms or form.removeprefix("get-state-dict-") in forms)
    return _Side(label, path, strategy, forms, ranks, opened.evidence)


def _convert(source: Path, folder: Path, to: str, ranks: int, workload: Workload) -> Path:
    """What the strategy `to` usually reads: one file, a DCP folder, or a ZeRO folder of its stage."""
    import ckptkit

    get_strategy(to)
    family = to.partition("-")[0]
    target = {"ddp": "full", "single": "full", "fsdp1": "dcp", "fsdp2": "dcp"}.get(family, family)
    out = folder / ("converted.pt" if target == "full" else "converted")
    ckptkit.convert(
        source, out, to=target, world_size=None if target == "full" else ranks, model=workload.model,
        optimizer_keys="id" if target == "full" else "fqn",
    )  # fmt: skip
    return out


def _precision(opened: OpenCheckpoint) -> str:
    return "bf16" if any(key.slot == "master" for key in opened.entries) else "fp32"


def _optimizer(opened: OpenCheckpoint) -> str:
    return "sgd" if any(key.slot == "momentum_buffer" for key in opened.entries) else "adamw"


def _run(pool: Pool, side: _Side, workload: Workload, how: Options, steps: int) -> tuple[Trace, str]:
    """The trace, and a note on who read the checkpoint."""
    label = f"{side.label}, {side.strategy}"
    try:
        answers: list[Resumed | None] = pool.run(
            resume, world_size=side.world_size, name=side.strategy, forms=side.forms, path=str(side.path),
            workload=workload, options=how, steps=steps,
        )  # fmt: skip
    except UsageError:
        raise
    except (JobError, CkptkitError) as error:
        reason = "\n".join(part for part in (error.what, *error.faults, error.why) if part)
        return Trace.failed(label, side.strategy, reason, world_size=side.world_size, precision=how.precision), ""
    done = answers[0]
    assert done is not None
    return replace(done.trace, label=label), f"{side.label}: {done.reader}"
