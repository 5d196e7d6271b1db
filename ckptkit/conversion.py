"""Convert a checkpoint: open, transform, lay out, plan, write, and read back what was written."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .checking import check_written, unplanned
from .core.assemble import Hints
from .core.checkpoint import Checkpoint, Contents, Drop, ModelFacts
from .core.disassemble import disassemble
from .core.dtype import named
from .core.execute import execute
from .core.gather import CHUNK
from .core.layout import Layout, OutFile
from .core.options import WriteOptions
from .core.plan import Plan, make_plan
from .core.spec import Tensor
from .core.transform import renamed, renaming, weights_only, with_dtype, with_weights
from .dialects import ForFolders, Writes, dialects
from .difference import Difference
from .errors import CheckError, LossError, TargetError, UsageError
from .formats import Limited, Writable, targets, writers
from .io.move import move
from .io.places import forget_open_files
from .io.seals import check_seals
from .io.stage import check_target, staged
from .opened import OpenCheckpoint
from .opening import open as open_checkpoint
from .replaced import check_replaced
from .ties import with_ties

Check = Literal["none", "structure", "full"]

# A strategy's name as `--to` means the container that its runs usually write.
STRATEGY_TARGETS = {"ddp": "full", "fsdp1": "dcp", "fsdp2": "dcp", "deepspeed": "zero2"}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `convert`, as on the command line; `model` is what `--model` answered."""

    to: str
    dialect: str | None = None
    world_size: int | None = None
    dtype: str | None = None
    weights_only: bool = False
    weights: Literal["master", "value"] = "master"
    optimizer: bool = False
    optimizer_keys: Literal["fqn", "id"] = "fqn"
    flat_optimizer: bool = False
    prefix: str = ""
    strip_prefix: str = ""
    rename: tuple[str, ...] = ()
    max_shard_size: int = 5_000_000_000
    ds_config: dict[str, object] | None = None
    mesh: str = "cuda:fsdp"
    allow_drop: bool = False
    overwrite: bool = False
    check: Check = "full"
    workers: int = 2
    model: ModelFacts | None = None
    fsdp_units: tuple[str, ...] = ()
    use_orig_params: bool = False
    fsdp_param_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did (or, without `written`, would do)."""

    source: Checkpoint
    target: str
    to: str
    dialect: str
    plan: Plan
    written: bool
    checked: Check
    refused: bool = False

    def as_json(self) -> dict[str, Any]:
        source = self.source
        return {
            "source": {"path": source.path, "format": source.format, "dialect": source.dialect,
                       "evidence": list(source.evidence), "world_size": source.world_size},
            "target": {"path": self.target, "format": self.to, "dialect": self.dialect},
            "plan": self.plan.as_json(),
            "written": self.written,
            "checked": self.checked,
            "refused": self.refused,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Prepared:
    source: OpenCheckpoint
    planned: Checkpoint
    to: str
    dialect: str
    plan: Plan


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str,
    format: str = "auto",
    source_dialect: str = "auto",
    dialect: str | None = None,
    world_size: int | None = None,
    dtype: str | None = None,
    weights_only: bool = False,
    weights: Literal["master", "value"] = "master",
    optimizer: bool = False,
    optimizer_keys: Literal["fqn", "id"] = "fqn",
    flat_optimizer: bool = False,
    prefix: str = "",
    strip_prefix: str = "",
    rename: Sequence[str] = (),
    max_shard_size: int = 5_000_000_000,
    ds_config: dict[str, object] | None = None,
    mesh: str = "cuda:fsdp",
    fsdp_units: Sequence[str] = (),
    use_orig_params: bool = False,
    fsdp_param_dtype: str | None = None,
    param_names: Sequence[str] | None = None,
    model: str | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    allow_drop: bool = False,
    overwrite: bool = False,
    check: Check = "full",
    workers: int = 2,
    dry_run: bool = False,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> ConvertReport:
    """Convert the checkpoint `src` to the format `to` at `dst`. The keywords are the command's options.

    `progress(phase, bytes, of_bytes)` is called while writing (`write`) and reading back (`check`).
    Returns a report whose plan lists files, casts, drops and warnings; with `dry_run` nothing is written.

    Raises SourceError, UsageError; ExistsError before anything is read if `dst` exists; LossError where the target
    cannot hold all of it and `allow_drop` is not given; CheckError where the output does not read back as planned (it
    is removed then).
    """
    options = Options(
        to=to, dialect=dialect, world_size=world_size, dtype=dtype, weights_only=weights_only, weights=weights,
        optimizer=optimizer, optimizer_keys=optimizer_keys, flat_optimizer=flat_optimizer, prefix=prefix,
        strip_prefix=strip_prefix, rename=tuple(rename), max_shard_size=max_shard_size, ds_config=ds_config, mesh=mesh,
        allow_drop=allow_drop, overwrite=overwrite, check=check, workers=workers, fsdp_units=tuple(fsdp_units),
        use_orig_params=use_orig_params, fsdp_param_dtype=fsdp_param_dtype,
    )  # fmt: skip
    _check_options(options)
    target = Path(dst)
    if not dry_run:
        check_target(target, overwrite=overwrite, sources=(Path(src),))
    if model is not None:
        from .io.model import describe

        options = replace(options, model=describe(model))
    source = open_checkpoint(
        src, format, source_dialect, param_names=param_names, model=options.model, model_key=model_key,
        optimizer_key=optimizer_key,
    )  # fmt: skip
    source = with_ties(source) if model is None else source
    return write_checkpoint(source, target, options, dry_run=dry_run, progress=progress)


def write_checkpoint(
    source: OpenCheckpoint,
    target: Path,
    options: Options,
    *,
    dry_run: bool = False,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> ConvertReport:
    """Write an open checkpoint as `options` say: what `convert` does after opening. Raises as `convert` does."""
    prepared = prepare(source, options, target)
    refused = bool(prepared.plan.drops) and not options.allow_drop
    report = ConvertReport(source, str(target), prepared.to, prepared.dialect, prepared.plan, False, "none", refused)
    if dry_run:
        return report
    if refused:
        raise loss(prepared.plan.drops, options.to)
    _write(prepared, target, options, progress)
    return replace(report, written=True, checked=options.check)


def _check_options(options: Options) -> None:
    """What the command line checks by itself, for callers from Python. Raises UsageError."""
    _target(STRATEGY_TARGETS.get(options.to, options.to))
    for name, allowed in (("weights", ("master", "value")), ("optimizer_keys", ("fqn", "id")),
                          ("check", ("none", "structure", "full"))):  # fmt: skip
        if getattr(options, name) not in allowed:
            raise UsageError(
                f"{name}={getattr(options, name)!r} is no choice", why="it has fixed values",
                hint=f"one of {', '.join(allowed)}",
            )  # fmt: skip
    for name in ("world_size", "workers", "max_shard_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} is too small", why="it counts things", hint="give 1 or more")


def loss(drops: Sequence[Drop], to: str) -> LossError:
    """The refusal that names every drop."""
    return LossError(
        f"{len(drops)} things of the source would not be in the target",
        why=f"{to} cannot hold them, or they cannot be read here",
        hint="--allow-drop goes on without them; --weights-only asks for the model alone",
        faults=[f"{drop.what}: {drop.reason}" for drop in drops],
    )


def prepare(source: OpenCheckpoint, options: Options, target: Path | None = None) -> _Prepared:
    """Everything up to the plan: pure, but for metadata that was read when the source was opened."""
    name = STRATEGY_TARGETS.get(options.to, options.to)
    container = _target(name)
    keeps_masters = bool(getattr(container, "MASTERS", False))
    dialect = options.dialect or str(getattr(container, "DIALECT", "plain"))
    writer = dialects().get(dialect)
    if not isinstance(writer, Writes):
        known = ", ".join(sorted(key for key, each in dialects().items() if isinstance(each, Writes)))
        raise UsageError(
            f"there is no dialect {dialect!r} to write",
            why="it does not exist, or is only read",
            hint=f"there are {known}",
        )
    planned = _transformed(source, options, keeps_masters)
    state = disassemble(planned, optimizer_keys=options.optimizer_keys, prefix=options.prefix)
    write_options = WriteOptions(
        target=name,
        world_size=options.world_size,
        source_world_size=source.world_size,
        optimizer_keys=options.optimizer_keys,
        flat_optimizer=options.flat_optimizer,
        prefix=options.prefix,
        dtype=_dtype(options.dtype),
        max_shard_size=options.max_shard_size,
        with_optimizer=options.optimizer and not options.weights_only,
        ds_config=options.ds_config,
        mesh=options.mesh,
        fsdp_units=options.fsdp_units,
        use_orig_params=options.use_orig_params,
        fsdp_param_dtype=_dtype(options.fsdp_param_dtype),
        hints=Hints(model=options.model),
        single_file=target is not None and target.suffix == ".safetensors",
    )
    parts = writer.write(state, container.NAME)
    layout, drops, warnings = _layout(parts, write_options)
    drops += getattr(writer, "drops", lambda state, format: ())(state, container.NAME)
    drops += unplanned(planned, layout.held, drops)
    plan = make_plan(
        layout,
        [*planned.drops, *drops],
        [*source.warnings, *warnings],
        chunk=CHUNK,
        workers=min(options.workers, len(layout.files)),
    )
    return _Prepared(source, planned, container.NAME, dialect, plan)


def _target(name: str) -> Writable:
    known = targets()
    if name not in known:
        raise UsageError(
            f"there is no target format {name!r}",
            why="a target is a format that can be written, or a strategy's name",
            hint=f"there are {', '.join(sorted(known))}; strategies: {', '.join(STRATEGY_TARGETS)}",
        )
    return known[name]


def _transformed(source: OpenCheckpoint, options: Options, keeps_masters: bool) -> Checkpoint:
    planned: Checkpoint = source
    if options.strip_prefix or options.rename:
        planned = renamed(planned, renaming(options.strip_prefix, options.rename))
    if options.weights_only:
        planned = weights_only(planned)
    planned = with_weights(planned, options.weights, keep_masters=keeps_masters and not options.weights_only)
    if options.dtype:
        dtype = _dtype(options.dtype)
        assert dtype is not None, "a name was given"
        planned = with_dtype(planned, dtype, keep_masters=keeps_masters)
    return planned


def _dtype(name: str | None) -> str | None:
    if not name:
        return None
    try:
        return named(name)
    except KeyError as error:
        raise UsageError(
            f"there is no dtype {name!r}", why="torch has none of this name", hint="fp32, bf16, fp16, ..."
        ) from error


def _layout(parts: Any, options: WriteOptions) -> tuple[Layout, list[Drop], list[str]]:
    """Lay out every part of the target; a dialect that writes a folder has several."""
    known = writers()
    files: list[OutFile] = []
    implied: list[Tensor] = []
    drops: list[Drop] = []
    warnings: list[str] = []
    single = False
    for path, contents in parts.items():
        container = known[contents.format]
        drops += _said(container, "drops", contents, options)
        warnings += [*contents.warnings, *_said(container, "warnings", contents, options)]
        layout = container.layout(contents, options)
        implied += layout.implied
        if not path:
            files, single = [*files, *layout.files], layout.is_file
        elif layout.is_file:
            files.append(OutFile(path, layout.files[0].segments))
        else:
            files += layout.below(path).files
    return Layout(tuple(files), single, tuple(implied)), drops, warnings


def _said(container: Any, what: str, contents: Contents, options: WriteOptions) -> list[Any]:
    if what == "drops" and not isinstance(container, Limited):
        return []
    ask = getattr(container, what, None)
    return list(ask(contents, options)) if ask else []


def _write(prepared: _Prepared, target: Path, options: Options, progress: Callable[[str, int, int], None]) -> None:
    layout = prepared.plan.layout
    check_replaced(target, {file.name for file in layout.files})
    total, done, lock = layout.size, 0, threading.Lock()
    _check_space(target, total)

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            progress("write", done, total)

    with staged(target, is_file=layout.is_file, overwrite=options.overwrite) as stage:
        execute(layout, stage.create, move, workers=options.workers, progress=count)
        if options.check == "full":
            tensors = prepared.planned.entries.values()
            check_seals(tensors, workers=options.workers, progress=lambda done, of: progress("checksums", done, of))
        differences = _read_back(prepared, stage.root, options, progress) if options.check != "none" else []
        forget_open_files()
        if differences:
            raise CheckError(
                "what was written does not read back as planned",
                why="the output was removed; the source is untouched",
                hint="this is a fault of ckptkit or of the disk: run it again, and report it if it comes back",
                faults=[str(each) for each in differences[:20]],
            )


def _read_back(
    prepared: _Prepared, root: Path, options: Options, progress: Callable[[str, int, int], None]
) -> list[Difference]:
    folder = isinstance(dialects()[prepared.dialect], ForFolders)
    # Ids say nothing of names: reading back is told the order in which they were given.
    names = [name for group in prepared.planned.param_groups for name in group["params"]]
    written = open_checkpoint(
        root, "auto" if folder else prepared.to, prepared.dialect, param_names=names or None, model=options.model
    )
    return check_written(
        prepared.planned,
        prepared.plan,
        written,
        values=options.check == "full",
        progress=lambda done, total: progress("check", done, total),
    )


def _check_space(target: Path, size: int) -> None:
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise TargetError(
            f"{target} needs {size:,} bytes and {folder} has {free:,} free",
            why="the output is written beside the target before it replaces anything",
            hint="free space or choose another target",
        )
