"""`ckptkit convert`: moves a checkpoint to another format, dialect or world size."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.errors import UsageError

from ._show import print_json, progress_bar, size

NAME = "convert"


class Weights(str, Enum):
    """Which weights a target without masters gets."""

    master = "master"
    value = "value"


class Keys(str, Enum):
    """How a full target names parameters in its optimizer."""

    fqn = "fqn"
    id = "id"


class Check(str, Enum):
    """How much of the output is read back and compared."""

    none = "none"
    structure = "structure"
    full = "full"


def command(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint: a file or a folder.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Where to write; must not exist.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="Target format or strategy.")],
    source: Annotated[str, typer.Option("--from", metavar="FORMAT", help="Source format or strategy.")] = "auto",
    source_dialect: Annotated[
        str, typer.Option("--from-dialect", metavar="NAME", help="Source key convention.")
    ] = "auto",
    dialect: Annotated[str | None, typer.Option("--dialect", metavar="NAME", help="Target key convention.")] = None,
    world_size: Annotated[int | None, typer.Option("--world-size", min=1, help="Ranks of the target.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Cast the parameters (bf16, fp32, ...).")] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Only the model's own tensors.")] = False,
    weights: Annotated[Weights, typer.Option("--weights", help="fp32 masters, or weights as held.")] = Weights.master,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="safetensors: a second file for the optimizer.")
    ] = False,
    optimizer_keys: Annotated[Keys, typer.Option("--optimizer-keys", help="full: FQNs or integers.")] = Keys.fqn,
    flat_optimizer: Annotated[bool, typer.Option("--flat-optimizer", help="dcp: flattened optimizer keys.")] = False,
    prefix: Annotated[str, typer.Option("--prefix", help="Put before the model's names (module. for DDP).")] = "",
    strip_prefix: Annotated[str, typer.Option("--strip-prefix", help="Taken off every name.")] = "",
    rename: Annotated[
        list[str] | None, typer.Option("--rename", metavar="REGEX=...", help="Rename; repeatable.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="safetensors: split above this.")] = "5GB",
    ds_config: Annotated[Path | None, typer.Option("--ds-config", help="DeepSpeed JSON: options of layout.")] = None,
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="TYPE[:NAME]", help="rank_files: the mesh of its DTensors.")
    ] = "cuda:fsdp",
    fsdp_units: Annotated[
        str, typer.Option("--fsdp-units", metavar="NAME[,NAME...]", help="fsdp1-local: the modules that FSDP1 wraps.")
    ] = "",
    use_orig_params: Annotated[
        bool, typer.Option("--use-orig-params/--no-use-orig-params", help="fsdp1-local: as FSDP1 is called.")
    ] = False,
    fsdp_param_dtype: Annotated[
        str | None, typer.Option("--fsdp-param-dtype", help="fsdp1-local: MixedPrecision's param_dtype.")
    ] = None,
    param_names: Annotated[
        Path | None, typer.Option("--param-names", help="Names for integer ids, one a line.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PKG.MOD:FACTORY", help="Builds the model.")] = None,
    model_key: Annotated[str | None, typer.Option("--model-key", help="Where the model lies, as netG or a.b.")] = None,
    optimizer_key: Annotated[str | None, typer.Option("--optimizer-key", help="Where its optimizer lies.")] = None,
    allow_drop: Annotated[bool, typer.Option("--allow-drop", help="Go on without what cannot be carried.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST once the new one is whole.")] = False,
    check: Annotated[Check, typer.Option("--check", help="Read back and compare.")] = Check.full,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Files written at a time.")] = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Move a checkpoint to another format, dialect or world size: weights, masters, optimizer, steps, groups, extras.

    FORMAT is a container (see `ckptkit explain`) or a strategy, which means its usual container. What the target cannot
    hold is listed, and the conversion is refused unless --allow-drop or --weights-only is given. The output is staged,
    read back, and renamed into place; the source is never changed.
    """
    from ckptkit.conversion import convert

    with progress_bar(not as_json) as progress:
        report = convert(
            src,
            dst,
            to=to,
            format=source,
            source_dialect=source_dialect,
            dialect=dialect,
            world_size=world_size,
            dtype=dtype,
            weights_only=weights_only,
            weights=weights.value,
            optimizer=optimizer,
            optimizer_keys=optimizer_keys.value,
            flat_optimizer=flat_optimizer,
            prefix=prefix,
            strip_prefix=strip_prefix,
            rename=tuple(rename or ()),
            max_shard_size=parse_size(max_shard_size),
            ds_config=_json_file(ds_config) if ds_config else None,
            mesh=mesh,
            fsdp_units=tuple(name.strip() for name in fsdp_units.split(",") if name.strip()),
            use_orig_params=use_orig_params,
            fsdp_param_dtype=fsdp_param_dtype,
            param_names=_lines(param_names) if param_names else None,
            model=model,
            model_key=model_key,
            optimizer_key=optimizer_key,
            allow_drop=allow_drop,
            overwrite=overwrite,
            check=check.value,
            workers=workers,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        print_json(report.as_json())
    else:
        _print(report, dry_run)
    return 5 if report.refused else 0


def _print(report: Any, dry_run: bool) -> None:
    source, plan = report.source, report.plan
    typer.echo(f"source: {source.format}, dialect {source.dialect} ({', '.join(source.evidence)})")
    typer.echo(
        f"target: {report.to}, dialect {report.dialect}, {len(plan.layout.files)} files, {size(plan.layout.size)}"
    )
    lossy = [cast for cast in plan.casts if not cast.lossless]
    if plan.casts:
        rounded = f", {len(lossy)} of them round" if lossy else ", none rounds"
        typer.echo(f"casts: {len(plan.casts)} tensors change dtype{rounded}")
    for drop in plan.drops:
        typer.echo(f"drop: {drop.what}: {drop.reason}")
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if not dry_run:
        said = {"none": "not checked", "structure": "structure checked", "full": "read back, equal to the last bit"}
        typer.echo(f"wrote {report.target} ({said[report.checked]})")
        return
    for file in plan.layout.files:
        typer.echo(f"  {size(file.size):>10}  {file.name}")
    typer.echo(f"peak memory of buffers: {size(plan.peak_bytes)}")
    if report.refused:
        typer.echo("refused without --allow-drop: see the drops above", err=True)


def parse_size(text: str) -> int:
    """Bytes from `5GB`, `500MB`, `2GiB` or a plain number; GB are 10**9 as Hugging Face counts them.

    >>> parse_size("5GB"), parse_size("2KiB"), parse_size("10")
    (5000000000, 2048, 10)
    """
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20,
             "GIB": 2**30, "TIB": 2**40}  # fmt: skip
    number = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        count = int(float(number) * units[unit])
    except (KeyError, ValueError):
        count = 0
    if count < 1:
        raise UsageError(
            f"{text!r} is no size",
            why="it is a number with a unit of bytes, or without one",
            hint="write 5GB, 500MB or a number of bytes",
        )
    return count


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}", why=str(error), hint="name a text file, one name a line") from error


def _json_file(path: Path) -> dict[str, object]:
    import json

    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}", why=str(error), hint="name a DeepSpeed JSON config") from error
    if not isinstance(value, dict):
        raise UsageError(
            f"{path} holds no JSON object",
            why=f"it holds a {type(value).__name__}",
            hint="name a DeepSpeed JSON config",
        )
    return value
