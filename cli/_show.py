"""What commands share on the screen: sizes in words, JSON with its schema number, one progress bar on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

SCHEMA = 1


def size(count: float) -> str:
    """Bytes in words.

    >>> size(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def print_json(body: dict[str, Any]) -> None:
    """One object on stdout, in strict JSON."""
    typer.echo(json.dumps(_plain({"schema": SCHEMA, **body}), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """JSON has no infinities and no keys but strings: both are said in words."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist()) if getattr(value, "size", 0) <= 16 else f"array of {value.size}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)


@contextmanager
def progress_bar(show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A callback `(phase, done, total)` in bytes that draws one bar on stderr where that is a terminal."""
    if not show or not sys.stderr.isatty():
        yield lambda phase, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description:6}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done)

        yield advance
