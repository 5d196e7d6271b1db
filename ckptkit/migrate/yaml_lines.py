"""Edits of a YAML file line by line, so that everything else stays byte for byte."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from .configs import ConfigFile
from .grade import Grade

Tree = MutableMapping[str, Any]


@dataclass(slots=True)
class Lines:
    """Edits of whole lines, so that everything else stays byte for byte. Keys count their lines from 0."""

    lines: list[str]
    dropped: set[int] = field(default_factory=set)
    inserted: dict[int, list[str]] = field(default_factory=dict)  # before which line
    open_end: bool = False  # whether the last line has no newline

    @classmethod
    def of(cls, text: str) -> Lines:
        """The lines of a text."""
        lines = text.splitlines(keepends=True)
        open_end = bool(lines) and not lines[-1].endswith("\n")
        if open_end:
            lines[-1] += "\n"
        return cls(lines, open_end=open_end)

    def indent(self, at: int) -> str:
        """The white space before a line."""
        return re.match(r"\s*", self.lines[at]).group()  # type: ignore[union-attr]

    def put(self, at: int, key: str, value: object = None) -> None:
        """Give a line another key, and another value, if one is given; its comment stays."""
        found = re.match(r"(\s*)[\w-]+(\s*:\s*)([^\s#]*)(.*)", self.lines[at], re.DOTALL)
        assert found is not None
        indent, colon, old, rest = found.groups()
        self.lines[at] = f"{indent}{key}{colon}{old if value is None else plain(value)}{rest}"

    def insert(self, at: int, indent: str, entries: dict[str, object]) -> None:
        """Insert entries before a line."""
        self.inserted.setdefault(at, []).extend(f"{indent}{k}: {plain(v)}\n" for k, v in entries.items())

    def block(self, at: int) -> range:
        """The lines of a key's value that follow it: deeper ones, and a list at its own depth; no comments behind."""
        depth, stop = len(self.indent(at)), at + 1
        for index in range(at + 1, len(self.lines)):
            line = self.lines[index]
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            inner = len(self.indent(index))
            if inner < depth or (inner == depth and not line.lstrip().startswith("- ")):
                break
            stop = index + 1
        return range(at + 1, stop)

    def text(self) -> str:
        out: list[str] = []
        for index, line in enumerate([*self.lines, ""]):
            out += self.inserted.get(index, [])
            if index not in self.dropped:
                out.append(line)
        whole = "".join(out)
        return whole.removesuffix("\n") if self.open_end else whole


def plain(value: object) -> str:
    """A scalar as YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(file: ConfigFile) -> Tree | None:
    """The mapping in a file, with the lines of its keys; None, with a finding, where the file is no YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        tree = YAML().load(file.text)
    except YAMLError as error:
        file.note(Grade.MANUAL, f"cannot be read: {' '.join(str(error).split())[:120]}")
        return None
    return tree if isinstance(tree, MutableMapping) else None


def line_of(tree: Tree, key: str) -> int:
    """The line of a key, from 0, in a mapping that ruamel.yaml has read."""
    return int(tree.lc.key(key)[0])  # type: ignore[attr-defined]
