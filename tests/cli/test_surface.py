"""The surface: names of commands, options and their defaults, frozen in surface.txt; what a start imports.

`CKPTKIT_WRITE_SURFACE=1 pytest tests/cli/test_surface.py` writes the file anew: its diff is the change of the surface.
"""

from __future__ import annotations

import os
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer
from ckptkit.cli.main import app

from ckptkit.errors import Exit

from .run import checkpoint, ckptkit

SURFACE = Path(__file__).with_name("surface.txt")
ROOT = Path(__file__).resolve().parents[2]


def surface() -> str:
    root: Any = typer.main.get_command(app())
    lines = [f"{code.name.lower()} exits with {int(code)}" for code in Exit]
    for name, command in [("", root), *sorted(root.commands.items())]:
        lines.append(f"\nckptkit {name}".rstrip())
        for parameter in command.params:
            if {"--help", "--install-completion", "--show-completion"} & set(parameter.opts):
                continue
            names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else parameter.name.upper()
            default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
            choices = getattr(getattr(parameter, "type_descriptor", None), "choices", None)  # typer >= 0.22
            said = [
                "required" if parameter.required else f"default {default!r}",
                *(["repeatable"] if parameter.multiple else []),
                *([f"one of {', '.join(getattr(c, 'value', str(c)) for c in choices)}"] if choices else []),
            ]
            lines.append(f"  {names}: {'; '.join(said)}")
    return "\n".join(lines) + "\n"


def test_the_surface_is_as_it_was() -> None:
    if os.environ.get("CKPTKIT_WRITE_SURFACE"):
        SURFACE.write_text(surface(), encoding="utf-8")
    assert surface() == SURFACE.read_text(encoding="utf-8"), "CKPTKIT_WRITE_SURFACE=1 writes it anew"


def test_every_option_says_what_it_does() -> None:
    root: Any = typer.main.get_command(app())
    for command in (root, *root.commands.values()):
        assert command.help
        assert [p.name for p in command.params if p.param_type_name == "option" and not p.help] == []


def modules_after(*arguments: str, cwd: Path = ROOT) -> tuple[int, set[str], str]:
    """The exit code of a command in a process of its own, the modules that it imported, and its output."""
    script = (
        "import sys; from ckptkit.cli.main import main; code = main(sys.argv[1:]); "
        "print('MODULES', *sys.modules); sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=cwd,
                          env=environment, timeout=120)  # fmt: skip
    out, _, modules = done.stdout.rpartition("MODULES")
    return done.returncode, set(modules.split()), out


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("convert", "--help"), ("explain",), ("explain", "full"), ("migrate", "--help"),
     ("migrate", "train.py")],
    ids=" ".join,
)  # fmt: skip
def test_a_start_imports_no_torch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
                                       "def wrap(model):\n    return FSDP(model)\n")  # fmt: skip
    code, modules, out = modules_after(*arguments, cwd=tmp_path)
    assert code in (0, 1) and out
    assert "ckptkit.cli.main" in modules
    assert not {"torch", "numpy", "deepspeed", "transformers", "accelerate"} & modules


def test_what_reads_a_checkpoint_imports_torch_and_no_framework(tmp_path: Path) -> None:
    """The control of the test above, and: reading needs none of the frameworks."""
    code, modules, out = modules_after("inspect", str(checkpoint(tmp_path / "a.pt")))
    assert code == 0 and "torch" in modules and "full" in out
    assert not {"deepspeed", "transformers", "accelerate"} & modules


def test_there_is_no_bar_where_stderr_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = ckptkit(capsys, "convert", checkpoint(tmp_path / "a.pt"), tmp_path / "out", "--to", "full")
    assert (result.code, result.err) == (0, "") and "\x1b" not in result.out and "\r" not in result.out


def test_there_is_one_where_it_is(tmp_path: Path) -> None:
    """In a pseudo-terminal: the bar is drawn on stderr, and stdout is what it is without it."""
    import pty

    source = checkpoint(tmp_path / "a.pt")
    script = "from ckptkit.cli.main import run; run()"
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", script, "convert", str(source), str(tmp_path / "out"), "--to", "full"],
        stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(theirs)
    drawn = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0 and done.stdout.count("\n") >= 3 and "\x1b" not in done.stdout
    assert "write" in drawn and "\x1b" in drawn


def test_help_without_arguments_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert ckptkit(capsys).code == Exit.USAGE
    result = ckptkit(capsys, "--help")
    assert result.code == 0 and all(name in result.out for name in ("convert", "inspect", "diff", "explain", "migrate"))


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "a.pt")
    script = "from ckptkit.cli.main import run; run()"
    command = f"{sys.executable} -c '{script}' inspect {source} --tensors --json | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert "Traceback" not in done.stderr and "error" not in done.stderr
