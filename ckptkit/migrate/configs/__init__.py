"""Converters of configuration files beside the code: one kind of file each, found by listing this folder.

A converter is a module whose docstring is its page, as a rule's is. It defines `SOURCES`, `SUFFIXES`,
`claims(text)`, whether a file is of its kind, and `convert(file)`, which answers the new text and reports into `file`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..grade import Finding, Grade

_NOT_LOOKED_INTO = {"node_modules", "build", "dist", "__pycache__", "site-packages", "venv"}


@dataclass(slots=True)
class ConfigFile:
    """A configuration file and what is said about it. Lines count from 1."""

    path: Path
    text: str
    rule: str
    findings: list[Finding] = field(default_factory=list)

    def note(self, grade: Grade, message: str, *, at: str = "") -> None:
        """Report something, at the first line that holds `at`."""
        lines = self.text.splitlines()
        line, column = next(((i, one.index(at)) for i, one in enumerate(lines) if at and at in one), (0, 0))
        self.findings.append(Finding(self.path, line + 1, column + 1, grade, self.rule, message))


@dataclass(frozen=True, slots=True)
class Converter:
    """One file of this folder."""

    name: str
    page: str
    sources: tuple[str, ...]
    suffixes: tuple[str, ...]
    claims: Callable[[str], bool]
    convert: Callable[[ConfigFile], str]


@cache
def converters() -> tuple[Converter, ...]:
    """All converters, by file name."""
    found = []
    for entry in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        module: Any = importlib.import_module(f"{__name__}.{entry.name}")
        name = entry.name.replace("_", "-")
        page = module.__doc__ or ""
        found.append(Converter(name, page, module.SOURCES, module.SUFFIXES, module.claims, module.convert))
    return tuple(found)


def suffixes() -> frozenset[str]:
    """The suffixes of files that some converter looks at."""
    return frozenset(suffix for converter in converters() for suffix in converter.suffixes)


def config_files(paths: Iterable[Path]) -> list[Path]:
    """The files of the paths that a converter may want, directories searched through."""
    wanted = suffixes()
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file() and path.suffix in wanted:
            found[path] = None
        for inner in sorted(path.rglob("*")) if path.is_dir() else ():
            parts = inner.relative_to(path).parts
            hidden = any(part.startswith(".") or part in _NOT_LOOKED_INTO for part in parts)
            if inner.suffix in wanted and not hidden and inner.is_file() and inner.stat().st_size < 1 << 20:
                found[inner] = None
    return list(found)


def convert(path: Path, data: bytes, active: Iterable[Converter]) -> tuple[str, str, list[Finding]] | None:
    """(old text, new text, findings) of a file that a converter claims; None when none does."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    for converter in active:
        if path.suffix in converter.suffixes and converter.claims(text):
            file = ConfigFile(path, text, converter.name)
            return text, converter.convert(file), file.findings
    return None
