"""One key convention a file: what the keys of a container mean. The folder is the registry.

A dialect is a module with

    NAME: str                        what `--dialect` calls it
    def read(parts: Mapping[str, Contents]) -> State
        Sort the trees by role. `parts` has the one container under the name "", or a folder's parts by their roles.
    def write(state: State, format: str) -> Mapping[str, Contents]
        The mirror of `read`: trees by relative path ("" for a target that is one container). `format` is the container
        that was asked for; raises UsageError for one that this framework does not use.
    def drops(state: State, format: str) -> Iterable[Drop]
        Extras that this framework has no place for, with reasons. Left out where `write` writes all of them.

and one or both of

    def claims(contents: Contents) -> str | None
        Whether one container's keys follow this convention; the evidence, or None. Conventions exclude each other.
    def find(path: Path) -> Mapping[str, Path] | None
        Whether a folder is this framework's, by file names alone; its parts by role, each a container or a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..core.checkpoint import Contents, State


@runtime_checkable
class Dialect(Protocol):
    """A key convention."""

    NAME: str

    def read(self, parts: Mapping[str, Contents]) -> State: ...


@runtime_checkable
class ForKeys(Protocol):
    """A convention that is known from the keys of one container."""

    def claims(self, contents: Contents) -> str | None: ...


@runtime_checkable
class ForFolders(Protocol):
    """A convention that is known from the names of files in a folder."""

    def find(self, path: Path) -> Mapping[str, Path] | None: ...


@runtime_checkable
class Writes(Protocol):
    """A convention that can be written."""

    def write(self, state: State, format: str) -> Mapping[str, Contents]: ...


def dialects() -> dict[str, Dialect]:
    """Every dialect in the folder, by name."""
    modules = (
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
        if not info.name.startswith("_")
    )
    return {module.NAME: module for module in modules if isinstance(module, Dialect)}
