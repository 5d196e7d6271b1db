"""Staged output: written beside the target, fsynced, and renamed as a whole: nothing half written looks whole."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ExistsError, TargetError, UsageError

_MARK = ".ckptkit-partial-"


@dataclass(slots=True)
class FileSink:
    """An output file that is fsynced when it is closed."""

    descriptor: int

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]

    def patch(self, offset: int, data: bytes) -> None:
        os.pwrite(self.descriptor, data, offset)

    def close(self) -> None:
        try:
            os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Stage:
    """The staged target: `root` is where it lies now, a directory or (with `is_file`) a single file."""

    root: Path
    is_file: bool

    def create(self, name: str) -> FileSink:
        """Open a new file below the root (or the single file itself)."""
        path = self.root if self.is_file else self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileSink(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def check_target(target: Path, *, overwrite: bool, sources: tuple[Path, ...] = ()) -> None:
    """Raise ExistsError where the target exists and may not be replaced, UsageError where it would touch a source."""
    resolved = target.resolve()
    for source in sources:
        inside = source.resolve()
        if resolved == inside or resolved in inside.parents or (inside.is_dir() and inside in resolved.parents):
            raise UsageError(
                f"the target {target} and the source {source} overlap",
                why="the source is never changed",
                hint="name a target outside of the source",
            )
    if os.path.lexists(target) and not overwrite:
        raise ExistsError(
            f"{target} exists", why="nothing is replaced unless it is asked for", hint="--overwrite, or another target"
        )


@contextmanager
def staged(target: Path, *, is_file: bool, overwrite: bool = False) -> Iterator[Stage]:
    """A stage that becomes `target` by a rename when the block ends well, and is removed when it does not.

    An existing target is replaced only with `overwrite`, and only after the new one is complete.
    """
    check_target(target, overwrite=overwrite)
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError(f"cannot make the folder {parent}", why=str(error), hint="choose another target") from error
    stage = Stage(parent / f".{target.name}{_MARK}{uuid.uuid4().hex[:8]}", is_file)
    try:
        if not is_file:
            stage.root.mkdir()
        yield stage
        _sync_folders(stage)
        check_target(target, overwrite=overwrite)  # another run may have written it in the meantime
        _publish(stage.root, target)
        _sync(parent)
    except OSError as error:
        raise TargetError(
            f"writing {target} failed", why=str(error), hint="nothing was left behind; free space or check permissions"
        ) from error
    finally:
        _remove(stage.root)


def _publish(root: Path, target: Path) -> None:
    if not os.path.lexists(target) or (root.is_file() and not target.is_dir()):
        os.replace(root, target)
        return
    old = target.with_name(f".{target.name}{_MARK}old-{uuid.uuid4().hex[:8]}")
    os.rename(target, old)
    try:
        os.rename(root, target)
    except OSError:
        os.rename(old, target)
        raise
    _remove(old)


def _sync_folders(stage: Stage) -> None:
    if not stage.is_file:
        for folder, _, _ in os.walk(stage.root):
            _sync(Path(folder))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink()
