"""`ckptkit verify`: proof by training that strategies, checkpoints or scripts compute the same losses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptkit.errors import ExistsError, SourceError, UsageError

from ._show import print_json

if TYPE_CHECKING:
    from ckptkit.verify.report import Report

NAME = "verify"


class Precision(str, Enum):
    """What is computed in."""

    fp32 = "fp32"
    bf16 = "bf16"


class Optimizer(str, Enum):
    """The optimizers of the strategies form."""

    adamw = "adamw"
    sgd = "sgd"


class Device(str, Enum):
    """Where to train; `auto` is every GPU, or the CPU where there is none."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Launch(str, Enum):
    """Who starts the processes of a script."""

    auto = "auto"
    torchrun = "torchrun"
    spawn = "spawn"


STRATEGIES, STATE, CODE = "Strategies form", "State form (--checkpoint)", "Code form (scripts)"


def command(
    scripts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OLD.py [NEW.py]] [-- ARGS]", help="Code form.", show_default=False),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="SRC", help="State form: resume this.", rich_help_panel=STATE)
    ] = None,
    converted: Annotated[
        Path | None,
        typer.Option("--converted", metavar="DST", help="... and this; else SRC is converted.", rich_help_panel=STATE),
    ] = None,
    to: Annotated[
        str, typer.Option("--to", metavar="STRATEGY", help="Strategy that resumes DST.", rich_help_panel=STATE)
    ] = "fsdp2",
    model: Annotated[str | None, typer.Option("--model", metavar="PKG.MOD:FACTORY", help="Your own model.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", metavar="PKG.MOD:FUNCTION", help="Its batches.")] = None,
    strategies: Annotated[
        list[str] | None, typer.Option("--strategies", metavar="NAME,...", help="Only these (default: all).")
    ] = None,
    precision: Annotated[
        list[Precision] | None, typer.Option("--precision", help="May be given twice.", show_default="both")
    ] = None,
    optimizer: Annotated[
        list[Optimizer] | None, typer.Option("--optimizer", help="May be given twice.", show_default="both")
    ] = None,
    clip: Annotated[float | None, typer.Option("--clip", help="Largest gradient norm; 0 for none.")] = None,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Micro-batches a step.")] = 1,
    world_size: Annotated[int | None, typer.Option("--world-size", min=1, help="Ranks (CPU 2, else GPUs).")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = 10,
    device: Annotated[Device, typer.Option("--device", help="cpu also runs scripts that ask for CUDA.")] = Device.auto,
    launch: Annotated[Launch, typer.Option("--launch", help="How scripts start.", rich_help_panel=CODE)] = Launch.auto,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds a script may take.")] = 600.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For weights and what scripts leave unseeded.")] = 0,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", help="Relative bound in place of the measured ones.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace report files.")] = False,
) -> None:
    """Prove by training that the losses are the same.

    Without arguments: the same model from the same weights on the same batches under every sharding strategy, against a
    single process. With --checkpoint: resume a checkpoint and its conversion, and compare the next steps. With scripts:
    run OLD.py and NEW.py (or what `ckptkit migrate` makes of OLD.py) unchanged, and compare the losses of every rank.

    On a mismatch it says at which step, by how much, in which tensor first, and which known cause it looks like.

    Exit codes: 0 everything that was asked for ran and matched, 1 a mismatch, a failure or something that could not
    run, 2 usage, 3 a source that cannot be read.
    """
    for path in (junit, html):
        if path is not None and path.exists() and not overwrite:
            raise ExistsError(f"{path} exists", why="reports are not replaced unasked", hint="--overwrite replaces it")
    if converted is not None and checkpoint is None:
        raise UsageError(
            "--converted needs --checkpoint", why="it is compared with that", hint="--checkpoint SRC --converted DST"
        )
    if checkpoint is not None and scripts:
        raise UsageError(
            "scripts and --checkpoint exclude each other", why="they are two questions", hint="ask one at a time"
        )
    if (model or batch) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where `python` would look for pkg.mod
    precisions = tuple(dict.fromkeys(each.value for each in precision or ()))
    optimizers = tuple(dict.fromkeys(each.value for each in optimizer or ()))
    names = tuple(name for part in strategies or () for name in part.split(",") if name)
    from ckptkit.verify.options import MatrixOptions

    training = MatrixOptions(
        strategies=names,
        model=model,
        batch=batch,
        world_size=world_size,
        steps=steps,
        device=device.value,
        precisions=precisions,
        optimizers=optimizers,
        clip=clip,
        accumulate=accumulate,
        seed=seed,
        tolerance=tolerance,
    )
    with _progress() as progress:
        if scripts:
            from ckptkit.verify.script import ScriptOptions, split_arguments, verify_scripts

            old, new, arguments = split_arguments(scripts)
            if len(precisions) > 1:
                raise UsageError(
                    "give one --precision for scripts", why="it chooses the tolerance, no more", hint="leave one out"
                )
            report = verify_scripts(
                old,
                new,
                ScriptOptions(
                    args=arguments,
                    launch=launch.value,
                    world_size=world_size or 2,
                    steps=steps,
                    device=device.value,
                    precision=precisions[0] if precisions else None,
                    tolerance=tolerance,
                    seed=seed,
                    timeout=timeout,
                ),
                rewrite=migrate_copy,
                progress=progress,
            )
        elif checkpoint is not None:
            from ckptkit.verify.state import verify_state

            report = verify_state(checkpoint, converted, training, to=to, progress=progress)
        else:
            from ckptkit.verify.matrix import verify_strategies

            report = verify_strategies(training, progress)
    _write(report, as_json=as_json, junit=junit, html=html)
    raise typer.Exit(int(report.exit_code))


def migrate_copy(copy: Path) -> str:
    """What `ckptkit migrate --write` makes of a copy of a script. Raises SourceError if it cannot be parsed."""
    from ckptkit import migrate

    before = copy.read_bytes()
    done = migrate.run([copy], write=True)
    for failed in done.failed:
        raise SourceError(
            f"{copy.name} cannot be migrated", why=failed.reason, hint="mend it, or name the migrated script as well"
        )
    if copy.read_bytes() == before:
        return f"ckptkit migrate changes nothing in {copy.name}"
    left = f"; {len(done.manual)} places are left for a person" if done.manual else ""
    return f"{copy.name} was migrated in a temporary copy, the file itself is unchanged{left}"


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A callback that shows what is being trained, on one line of stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda doing: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


def _write(report: Report, *, as_json: bool, junit: Path | None, html: Path | None) -> None:
    from rich.console import Console

    from ckptkit.verify.report import report_to_json
    from ckptkit.verify.report_github import github_annotations
    from ckptkit.verify.report_html import report_to_html
    from ckptkit.verify.report_junit import report_to_junit
    from ckptkit.verify.report_terminal import print_report

    if junit is not None:
        junit.write_text(report_to_junit(report), encoding="utf-8")
    if html is not None:
        html.write_text(report_to_html(report), encoding="utf-8")
    if as_json:
        print_json(report_to_json(report))
    else:
        print_report(report, Console())
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(report):
            typer.echo(line, err=as_json)
