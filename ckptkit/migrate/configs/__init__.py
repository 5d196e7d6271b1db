"""Converters of configuration files beside the code: one kind of file each, found by listing this folder.

A converter is a module whose docstring is its page, as a rule's is. It defines `SOURCES`, `SUFFIXES`,
`claims(text)`, whether a file is of its kind, and `convert(file)`, which answers the new text and reports into `file`.
"""

from __future__ import annotations

import codecs
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..grade import Finding, Grade


@dataclass(slots=True)
class ConfigFile:
    """A configuration file and what is said about it. Lines count from 1."""

    path: Path
    text: str
    rule: str
    findings: list[Finding] = field(default_factory=list)

    def note(self, grade: Grade, message: str, *, at: str = "", line: int = 0) -> None:
        """Report something, at a line, or at the first one that holds `at`."""
        if line:
            self.findings.append(Finding(self.path, line, 1, grade, self.rule, message))
            return
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


@dataclass(frozen=True, slots=True)
class Converted:
    """A file that a converter claims: its text before and after, the bytes to write, and what is said about it."""

    before: str
    after: str
    data: bytes
    findings: list[Finding]


def convert(path: Path, data: bytes, active: Iterable[Converter]) -> Converted | None:
    """Convert a file that one of the converters claims; None when none does.

    Converters see text without byte order mark and with plain newlines; both are put back.
    """
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    is_utf8 = True
    try:
        raw = data[len(mark) :].decode("utf-8")
    except UnicodeDecodeError:
        raw, is_utf8 = data.decode("latin-1"), False
    windows = raw.count("\r\n") == raw.count("\n") > 0
    text = raw.replace("\r\n", "\n") if windows else raw
    findings: list[Finding] = []
    claimed, new = False, text
    for converter in active:
        if path.suffix not in converter.suffixes or not converter.claims(new):
            continue
        claimed = True
        file = ConfigFile(path, new, converter.name)
        if is_utf8:
            new = converter.convert(file)
        else:
            file.note(Grade.MANUAL, "cannot be read: this is not UTF-8 text; save it as UTF-8 and migrate again")
        findings += file.findings
    if not claimed:
        return None
    if new == text:
        return Converted(raw, raw, data, findings)
    new = new.replace("\n", "\r\n") if windows else new
    return Converted(raw, new, mark + new.encode(), findings)
