"""One container a file: how bytes lie on disk. The folder is the registry.

A container is a module with

    NAME: str                        what `--from` and `--to` call it
    TARGETS: Mapping[str, str]       other names that `--to` takes for it, with what they mean (may be left out)
    DIALECT: str                     the dialect that is written unless one is named; `plain` where left out
    MASTERS: bool                    whether it has room for fp32 masters beside narrower weights; False where left out
    PART_ONLY: bool                  whether it only occurs inside a folder, never as a target; False where left out

    def detect(path: Path) -> str | None
        Whether the path is one of these, by file names and headers alone (nothing is unpickled); the evidence, or None.
    def read(path: Path, options: ReadOptions) -> Contents
        The tree of keys with a `Tensor` for every tensor: shapes and places, no tensor bytes.
        Raises SourceError naming every fault (every missing rank), UnsafePickleError.
    def layout(contents: Contents, options: WriteOptions) -> Layout
        The mirror of `read`: which bytes of which tensor go where. Left out by containers that are only read.
    def drops(contents: Contents, options: WriteOptions) -> Iterable[Drop]
        What `layout` cannot hold, with reasons. Left out where there is nothing.
    def warnings(contents: Contents, options: WriteOptions) -> Iterable[str]
        What a person should know of this target before it is written: how to load it, what its loader does not
        restore though the files hold it. Left out where there is nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..core.checkpoint import Contents, Drop
from ..core.layout import Layout
from ..core.options import ReadOptions, WriteOptions


@runtime_checkable
class Format(Protocol):
    """A container that can be read."""

    NAME: str

    def detect(self, path: Path) -> str | None: ...

    def read(self, path: Path, options: ReadOptions) -> Contents: ...


@runtime_checkable
class Writable(Protocol):
    """A container that can be written."""

    NAME: str

    def layout(self, contents: Contents, options: WriteOptions) -> Layout: ...


@runtime_checkable
class Limited(Protocol):
    """A container that cannot hold everything."""

    def drops(self, contents: Contents, options: WriteOptions) -> Iterable[Drop]: ...


def formats() -> dict[str, Format]:
    """Every container in the folder, by name."""
    modules = (
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
        if not info.name.startswith("_")
    )
    return {module.NAME: module for module in modules if isinstance(module, Format)}


def writers() -> dict[str, Writable]:
    """Every container that can be written, by name."""
    return {name: module for name, module in formats().items() if isinstance(module, Writable)}


def targets() -> dict[str, Writable]:
    """Every name that `--to` takes, with the container that writes it."""
    out: dict[str, Writable] = {}
    for name, module in writers().items():
        if not getattr(module, "PART_ONLY", False):
            names: Mapping[str, str] = getattr(module, "TARGETS", {})
            out |= dict.fromkeys((name, *names), module)
    return out
