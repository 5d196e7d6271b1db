"""How much an edit may change what a program computes, and the line that the report prints about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Grade(str, Enum):
    """The four grades of an edit, mildest first."""

    EXACT = "exact"  # same numbers
    PERFORMANCE = "performance"  # same numbers, other cost in time or memory
    NUMERICS = "numerics"  # other numbers; the message says how and why
    MANUAL = "manual"  # left for a person, with a TODO at the place


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: where, how sure, by which rule, and what. Lines and columns count from 1.

    In a notebook the line is one of the cell `cell`, which counts from 1 among all cells.
    """

    path: Path
    line: int
    column: int
    grade: Grade
    rule: str
    message: str
    cell: int | None = None

    def __lt__(self, other: Finding) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[object, ...]:
        return (self.path, self.cell or 0, self.line, self.column, self.grade, self.rule, self.message)

    def __str__(self) -> str:
        where = f"{self.path}:cell {self.cell}" if self.cell else str(self.path)
        return f"{where}:{self.line}:{self.column} {self.grade.value} {self.rule} {self.message}"

    def as_json(self) -> dict[str, str | int]:
        """The finding as plain JSON values; `cell` only in notebooks."""
        return {
            "path": str(self.path),
            **({"cell": self.cell} if self.cell else {}),
            "line": self.line,
            "column": self.column,
            "grade": self.grade.value,
            "rule": self.rule,
            "message": self.message,
        }
