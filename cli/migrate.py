"""`ckptkit migrate`: rewrites training code to FSDP2, as a diff or in place."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

NAME = "migrate"


class Source(str, Enum):
    """What the code uses now."""

    auto = "auto"
    fsdp1 = "fsdp1"
    ddp = "ddp"
    deepspeed = "deepspeed"


class Target(str, Enum):
    """What it shall use."""

    fsdp2 = "fsdp2"


def command(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Python files, notebooks, directories.", show_default=False)
    ] = None,
    source: Annotated[Source, typer.Option("--from", help="What the code uses now.")] = Source.auto,
    target: Annotated[Target, typer.Option("--to", help="What it shall use.")] = Target.fsdp2,
    write: Annotated[bool, typer.Option("--write", help="Change the files; without it a diff is printed.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if a file would change; print no diff.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    select: Annotated[list[str] | None, typer.Option("--select", metavar="RULE", help="Only these rules.")] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="RULE", help="All rules but these.")] = None,
    list_rules: Annotated[bool, typer.Option("--list-rules", help="Print the rules and what they do.")] = False,
) -> None:
    """Rewrite training code from FSDP1, DDP or DeepSpeed to FSDP2.

    Prints a unified diff, then one line a finding: file:line:col, grade (exact, performance, numerics, manual), rule,
    message. What is graded manual is left for a person, with a TODO at the place. A line comment `# ckptkit: skip`
    leaves a statement alone, `# ckptkit: skip-file` a file.

    Exit codes: 0 nothing left to do, 1 something left for a person (or would change, with --check), 2 usage, 3 a file
    that cannot be read or parsed (the others are migrated), 4 a file that cannot be written (then none is).
    """
    from ckptkit import migrate
    from ckptkit.errors import UsageError

    if list_rules:
        _print_rules(as_json)
        return
    if not paths:
        raise UsageError("no path given", why="there is nothing to migrate", hint="ckptkit migrate train.py")
    if write and check:
        raise UsageError(
            "--write and --check exclude each other",
            why="--check promises to change nothing",
            hint="leave one of them out",
        )
    report = migrate.run(
        paths,
        source=source.value,
        target=target.value,
        select=_names(select),
        ignore=_names(ignore),
        write=write,
    )
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print(report, diff=not write and not check)
    raise typer.Exit(int(report.exit_code(check=check)))


def _names(given: list[str] | None) -> tuple[str, ...]:
    """Rule names of a repeated option; `a,b` gives two, and `_` is as good as `-`."""
    return tuple(name.strip().replace("_", "-") for one in given or () for name in one.split(",") if name.strip())


def _print(report: object, *, diff: bool) -> None:
    from ckptkit.migrate import Report

    assert isinstance(report, Report)
    if diff:
        for changed in report.changed:
            sys.stdout.write(changed.diff())
    for failed in report.failed:
        where = f"{failed.path}:{failed.line}" if failed.line else str(failed.path)
        typer.echo(f"{where}: {failed.reason}", err=True)
    for finding in report.findings:
        typer.echo(str(finding), err=True)
    for line in report.commands:
        typer.echo(f"then: {line}", err=True)
    if not report.outcomes and not report.skipped:
        typer.echo("no Python file, notebook or configuration file to read there", err=True)
    verb = "changed" if report.written else "would change"
    typer.echo(
        f"{len(report.changed)} {verb}, {len(report.manual)} left for a person, {len(report.failed)} failed, "
        f"{report.skipped} do not use the APIs",
        err=True,
    )


def _print_rules(as_json: bool) -> None:
    from ckptkit.migrate import rules

    if as_json:
        rows = [{"name": rule.name, "sources": list(rule.sources), "summary": rule.summary} for rule in rules()]
        typer.echo(json.dumps({"schema": 1, "rules": rows}, indent=2))
        return
    for rule in rules():
        typer.echo(f"{rule.name:24} {','.join(rule.sources):20} {rule.summary}")
