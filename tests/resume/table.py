"""Render the resume matrix as the README's table: python -m tests.resume.table RESULTS.json

RESULTS.json is what the tests write with CKPTKIT_RESUME_TABLE set:
    CKPTKIT_RESUME_TABLE=results.json pytest tests/resume/test_matrix.py && python -m tests.resume.table results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .matrix import SOURCES, TARGETS

README = Path(__file__).resolve().parent.parent.parent / "README.md"
BEGIN, END = "<!-- resume-matrix -->", "<!-- /resume-matrix -->"


def rendered(results: dict[str, dict[str, float]]) -> str:
    """A Markdown table: sources down, targets across, the largest relative loss difference in each cell."""
    lines = [f"| from \\ to | {' | '.join(TARGETS)} |", f"|---|{'---|' * len(TARGETS)}"]
    for label, name in SOURCES.items():
        cells = [f"{results[target][name]:.0e}" for target in TARGETS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())
    text = README.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    README.write_text(f"{head}{BEGIN}\n{rendered(results)}\n{END}{tail}")


if __name__ == "__main__":
    main()
