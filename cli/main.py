"""The entry point: lists the folder for commands, turns every error into three lines (or JSON) and an exit code."""

from __future__ import annotations

import importlib
import json
import pkgutil
import signal
import sys
import traceback
from typing import Annotated, Any

import typer

from ckptkit import __version__
from ckptkit.errors import CkptkitError, Exit, UsageError

try:  # typer carries its own copy of click since 0.22
    from typer._click import exceptions as click_errors
except ImportError:  # pragma: no cover
    from click import exceptions as click_errors  # type: ignore[no-redef]

_NOT_COMMANDS = {"main"}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckptkit {__version__}")
        raise typer.Exit()


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Move training runs between PyTorch DDP, FSDP1, FSDP2 and DeepSpeed: checkpoints, code, and the proof.

    Exit codes: 0 ok, 1 findings (differences, mismatch, something left for a person), 2 usage, 3 source unreadable,
    4 destination exists or cannot be written, 5 cannot convert without loss, 6 check after writing failed, 101 bug,
    130 interrupted.
    """


def app() -> typer.Typer:
    """The application with every command of the folder. Imports no torch: commands import what they need when run."""
    root = typer.Typer(
        name="ckptkit", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    root.callback()(_root)
    package = __name__.rpartition(".")[0]
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if info.name.startswith("_") or info.name in _NOT_COMMANDS:
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        root.command(name=module.NAME)(module.command)
    return root


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code. SIGTERM (a scheduler's word) ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(int(main(sys.argv[1:] if arguments is None else arguments)))


def main(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    debug = "--debug" in arguments
    # `--debug` is taken anywhere: an error comes after the options were typed.
    arguments = [each for each in arguments if each != "--debug"]
    as_json = "--json" in arguments
    try:
        result = typer.main.get_command(app()).main(arguments, prog_name="ckptkit", standalone_mode=False)
        if result == Exit.INTERRUPTED:
            return _fail(_Interrupted(), as_json, debug=False)  # typer makes an exit of it before we see it
        return result if isinstance(result, int) else Exit.OK
    except CkptkitError as error:
        return _fail(error, as_json, debug)
    except click_errors.NoArgsIsHelpError as error:
        typer.echo(error.format_message())
        return Exit.USAGE
    except click_errors.UsageError as error:
        why = "the command line does not say what to do"
        return _fail(UsageError(error.format_message(), why=why, hint=_help_for(error)), as_json, debug)
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _fail(_Interrupted(), as_json, debug=False)
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): not our failure.
        sys.stderr.close()
        return Exit.OK
    except Exception as error:
        bug = CkptkitError(
            f"{type(error).__name__}: {error}",
            why="this is a bug of ckptkit; the source is untouched",
            hint="run it again with --debug and report the traceback",
        )
        return _fail(bug, as_json, debug)


class _Interrupted(CkptkitError):
    code = Exit.INTERRUPTED

    def __init__(self) -> None:
        super().__init__(
            "interrupted", why="a person stopped it", hint="run it again; nothing was left that looks complete"
        )


def _help_for(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path} --help shows what there is" if context else "ckptkit --help lists the commands"


def _fail(error: CkptkitError, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    if as_json:
        body: dict[str, Any] = {"kind": type(error).__name__, "what": error.what, "why": error.why, "hint": error.hint}
        typer.echo(json.dumps({"schema": 1, "error": {**body, "faults": list(error.faults), "code": int(error.code)}}))
        return error.code
    typer.echo(f"error: {error.what}", err=True)
    for fault in error.faults:
        typer.echo(f"  - {fault}", err=True)
    for label, text in (("why", error.why), ("hint", error.hint)):
        if text:
            typer.echo(f"{label}: {text}", err=True)
    return error.code
