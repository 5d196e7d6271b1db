"""`ckptkit inspect`: shows what a checkpoint holds, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._show import print_json, size

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint

NAME = "inspect"


def command(
    path: Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint: a file or a folder.")],
    source: Annotated[str, typer.Option("--from", metavar="FORMAT", help="Format or strategy.")] = "auto",
    dialect: Annotated[str, typer.Option("--dialect", metavar="NAME", help="Key convention.")] = "auto",
    model: Annotated[str | None, typer.Option("--model", metavar="PKG.MOD:FACTORY", help="Builds the model.")] = None,
    model_key: Annotated[str | None, typer.Option("--model-key", help="Where the model lies, as netG or a.b.")] = None,
    optimizer_key: Annotated[str | None, typer.Option("--optimizer-key", help="Where its optimizer lies.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show format, dialect, world size, step, sizes, optimizer, groups, tied and frozen parameters, extras.

    Reads headers only, whatever the size of the checkpoint, and unpickles nothing with Python's own unpickler.
    """
    from ckptkit.opening import open as open_checkpoint

    checkpoint = open_checkpoint(path, source, dialect, model=model, model_key=model_key, optimizer_key=optimizer_key)
    if as_json:
        print_json(described(checkpoint))
        return
    for line in summary(checkpoint):
        typer.echo(line)
    if tensors:
        for key, spec in checkpoint.tensors.items():
            typer.echo(f"{spec.dtype:>10} {list(spec.shape)!s:>18} {spec.role:>7}  {key}")


def summary(checkpoint: Checkpoint) -> Iterable[str]:
    """The lines that a person reads."""
    specs = checkpoint.tensors
    roles = Counter(spec.role for spec in specs.values())
    parameters = sum(s.numel for k, s in specs.items() if k.slot == "value" and s.role in ("param", "frozen"))
    yield f"path:       {checkpoint.path}"
    yield f"source:     {checkpoint.format}, dialect {checkpoint.dialect} ({', '.join(checkpoint.evidence)})"
    yield f"world size: {checkpoint.world_size if checkpoint.world_size is not None else 'not said'}"
    yield f"step:       {checkpoint.step if checkpoint.step is not None else 'not said'}"
    yield f"model:      {parameters:,} parameters, {roles['buffer']} buffers"
    for slot, (count, dtypes, total) in _slots(checkpoint).items():
        yield f"  {slot:<20} {count:>6} tensors  {size(total):>10}  {', '.join(sorted(dtypes))}"
    frozen = [key.fqn for key, spec in specs.items() if spec.role == "frozen"]
    yield from _listed("frozen", frozen)
    yield from _listed("tied", [f"{alias} = {owner}" for alias, owner in checkpoint.aliases.items()])
    for index, group in enumerate(checkpoint.param_groups):
        shown = ", ".join(f"{key}={_short(value)}" for key, value in group.items() if key != "params")
        yield f"group {index}:    {len(group['params'])} parameters; {shown}"
    yield from (f"extra:      {name} ({_short(tree)})" for name, tree in checkpoint.extras.items())
    yield from (f"dropped:    {drop.what}: {drop.reason}" for drop in checkpoint.drops)
    yield from (f"warning:    {warning}" for warning in checkpoint.warnings)


def _slots(checkpoint: Checkpoint) -> dict[str, tuple[int, set[str], int]]:
    out: dict[str, tuple[int, set[str], int]] = {}
    for key, spec in checkpoint.tensors.items():
        count, dtypes, total = out.get(key.slot, (0, set(), 0))
        out[key.slot] = (count + 1, dtypes | {spec.dtype}, total + spec.nbytes)
    return out


def _listed(label: str, names: list[str], limit: int = 6) -> Iterable[str]:
    if names:
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        yield f"{label + ':':<11} {', '.join(names[:limit])}{more}"


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """All of it as JSON values."""
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "dialect": checkpoint.dialect,
        "evidence": list(checkpoint.evidence),
        "world_size": checkpoint.world_size,
        "step": checkpoint.step,
        "bytes": checkpoint.nbytes,
        "tensors": [
            {"fqn": key.fqn, "slot": key.slot, "shape": list(spec.shape), "dtype": spec.dtype, "role": spec.role}
            for key, spec in checkpoint.tensors.items()
        ],
        "param_groups": [dict(group) for group in checkpoint.param_groups],
        "optimizer_values": {name: dict(slots) for name, slots in checkpoint.optimizer_values.items()},
        "aliases": dict(checkpoint.aliases),
        "extras": dict(checkpoint.extras),
        "drops": [{"what": drop.what, "reason": drop.reason} for drop in checkpoint.drops],
        "warnings": list(checkpoint.warnings),
    }
