"""What a diagnosis is: a cause with a stable name, the finding, the numbers behind it, and where to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`cause` is a stable name; `says` the finding in a sentence, `evidence` the numbers, `remedy` what to look at."""

    cause: str
    says: str
    evidence: str
    remedy: str


def listed(found: Sequence[str]) -> str:
    """The first three of several names."""
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{v:.6g}" for v in values) + "]"
