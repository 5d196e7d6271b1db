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


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One line of the report: where, how sure, by which rule, and what. Lines and columns count from 1."""

    path: Path
    line: int
    column: int
    grade: Grade
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.grade.value} {self.rule} {self.message}"

    def as_json(self) -> dict[str, str | int]:
        """The finding as plain JSON values."""
        return {
            "path": str(self.path),
            "line": self.line,
            "column": self.column,
            "grade": self.grade.value,
            "rule": self.rule,
            "message": self.message,
        }
