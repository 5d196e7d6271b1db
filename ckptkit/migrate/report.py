"""What a run of migrate answers: an outcome for each file, the findings, and the next commands."""

from __future__ import annotations

import codecs
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import Exit
from .grade import Finding, Grade
from .notebook import cells


@dataclass(frozen=True, slots=True)
class Changed:
    """A file that would change (or was changed, with `write`)."""

    path: Path
    before: str
    after: str
    data: bytes  # what the file shall hold
    original: bytes = b""  # what it held

    def diff(self) -> str:
        """Unified diff from the old to the new text, which `git apply` takes; of a notebook, one for each cell."""
        if self.path.suffix != ".ipynb":
            mark = "\ufeff" if self.original.startswith(codecs.BOM_UTF8) else ""
            return _diff(mark + self.before, mark + self.after, str(self.path))
        old, new = cells(self.before), cells(self.after)
        changed = [number for number in old if old[number] != new[number]]
        return "".join(_diff(old[number], new[number], f"{self.path}:cell {number}") for number in changed)


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A file that mentions the APIs and needs no edit."""

    path: Path


@dataclass(frozen=True, slots=True)
class Failed:
    """A file that could not be parsed, or on which a rule failed (`bug`); it is left as it is."""

    path: Path
    reason: str
    line: int = 0
    bug: bool = False


Outcome = Changed | Unchanged | Failed
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # `str.splitlines` would split at form feeds too


def _diff(before: str, after: str, name: str) -> str:
    old, new = _LINE.findall(before), _LINE.findall(after)
    lines = []
    for line in difflib.unified_diff(old, new, f"a/{name.lstrip('/')}", f"b/{name.lstrip('/')}"):
        lines.append(line if line.endswith(("\n", "\r")) else line + "\n\\ No newline at end of file\n")
    return "".join(lines)


@dataclass(slots=True)
class Report:
    """All outcomes of one run. `skipped` counts the files that do not mention the APIs and were not parsed."""

    outcomes: list[Outcome] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    skipped: int = 0
    written: bool = False

    @property
    def changed(self) -> list[Changed]:
        """The files that change."""
        return [one for one in self.outcomes if isinstance(one, Changed)]

    @property
    def failed(self) -> list[Failed]:
        """The files that could not be migrated at all."""
        return [one for one in self.outcomes if isinstance(one, Failed)]

    @property
    def manual(self) -> list[Finding]:
        """What is left for a person."""
        return [one for one in self.findings if one.grade is Grade.MANUAL]

    def exit_code(self, *, check: bool = False) -> Exit:
        """0, or 1 when something is left for a person (or, with `check`, would change), 3 when a file is
        unreadable.
        """
        if any(one.bug for one in self.failed):
            return Exit.BUG
        if self.failed:
            return Exit.SOURCE
        if self.manual or (check and self.changed):
            return Exit.FINDINGS
        return Exit.OK

    def as_json(self) -> dict[str, object]:
        """The report as plain JSON values, schema 1."""
        return {
            "schema": 1,
            "written": self.written,
            "skipped": self.skipped,
            "files": [
                {"path": str(one.path), "outcome": type(one).__name__.lower()}
                | ({"diff": one.diff()} if isinstance(one, Changed) else {})
                | ({"reason": one.reason, "line": one.line} if isinstance(one, Failed) else {})
                for one in self.outcomes
            ],
            "findings": [finding.as_json() for finding in self.findings],
            "commands": self.commands,
        }
