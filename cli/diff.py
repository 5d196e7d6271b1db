"""`ckptkit diff`: says where two checkpoints of any formats differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._show import print_json, progress_bar

NAME = "diff"


def command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of any format.")],
    rtol: Annotated[float | None, typer.Option("--tolerance", help="Relative tolerance; default: every bit.")] = None,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance beside --tolerance.")] = 0.0,
    slot: Annotated[list[str] | None, typer.Option("--slot", help="Only this slot (value, exp_avg, ...).")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PKG.MOD:FACTORY", help="Builds the model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Say which tensors, groups and extras two checkpoints do not share, or hold differently. Exit 1 if any.

    Streams both in bounded memory. Without --tolerance equal means equal in every bit.
    """
    from ckptkit.difference import diff

    tolerance = (rtol or 0.0, atol) if rtol is not None or atol else None
    with progress_bar(not as_json) as progress:
        report = diff(
            a, b, tolerance, slots=tuple(slot or ()), model=model,
            progress=lambda done, total: progress("diff", done, total),
        )  # fmt: skip
    if as_json:
        print_json(report.as_json())
    else:
        for each in report.differences:
            typer.echo(str(each))
        how = "every bit" if report.tolerance is None else f"rtol {report.tolerance[0]:g}, atol {report.tolerance[1]:g}"
        verdict = "no differences" if report.equal else f"{len(report.differences)} differences"
        typer.echo(f"{verdict} ({report.compared} tensors compared, {how})", err=True)
    return 0 if report.equal else 1
