"""Writes the changed files of a run: all of them or none, through symbolic links, modes kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import TargetError


@dataclass(frozen=True, slots=True)
class Write:
    """One file to write: what it held when it was read, and what it shall hold."""

    path: Path
    before: bytes
    after: bytes


def store(writes: Iterable[Write]) -> None:
    """Stage every file beside its target, then rename them all; what a link points to is written, not the link.

    Raises TargetError with every file that cannot be written (read-only, changed since it was read, no room); then no
    file is changed. Should a rename fail between others, those that went before are put back.
    """
    wanted = [Write(one.path.resolve(), one.before, one.after) for one in writes]
    if faults := [fault for one in wanted if (fault := _obstacle(one))]:
        raise _refusal(faults)
    staged: list[tuple[Path, Write]] = []
    try:
        for one in wanted:
            staged.append((_stage(one.path, one.after), one))
    except OSError as error:
        _remove(path for path, _ in staged)
        raise _refusal([str(error)]) from error
    except BaseException:
        _remove(path for path, _ in staged)
        raise
    done: list[Write] = []
    try:
        for path, one in staged:
            os.replace(path, one.path)
            done.append(one)
    except BaseException as error:
        for one in done:
            os.replace(_stage(one.path, one.before), one.path)
        _remove(path for path, _ in staged[len(done) :])
        if isinstance(error, OSError):
            raise _refusal([str(error)]) from error
        raise


def _obstacle(one: Write) -> str:
    # Renaming over a read-only file would work, but its owner has said that it shall stay.
    try:
        if not one.path.stat().st_mode & 0o222 or not os.access(one.path, os.W_OK):
            return f"{one.path} is read-only"
        if not os.access(one.path.parent, os.W_OK):
            return f"{one.path.parent} is read-only"
        return "" if one.path.read_bytes() == one.before else f"{one.path} has changed since it was read"
    except OSError as error:
        return str(error)


def _stage(path: Path, data: bytes) -> Path:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    staged = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        staged.chmod(path.stat().st_mode & 0o7777)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return staged


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _refusal(faults: list[str]) -> TargetError:
    return TargetError(
        f"{len(faults)} file{'s'[: len(faults) != 1]} cannot be written",
        why="a run writes all its files or none; none was changed",
        hint="make them writable, or leave them out with --check or a narrower PATH",
        faults=faults,
    )
