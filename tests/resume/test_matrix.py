"""The resume matrix: every source through every target's own loader at another world size, losses as uninterrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .matrix import SOURCES, TARGETS, run_column, worst

pytestmark = pytest.mark.slow
BOUND = 1e-6  # relative, at every step: fp32 sums over two and over three ranks differ in the last bit


@pytest.mark.parametrize("target", TARGETS)
def test_losses_go_on(target: str, pool: Any, fixture_dir: Callable[[str], Path], tmp_path: Path) -> None:
    results = run_column(pool, fixture_dir, list(SOURCES.values()), TARGETS[target], tmp_path)
    failed = {name: computed for name, (computed, _) in results.items() if isinstance(computed, str)}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    gaps = {name: worst(computed, wanted) for name, (computed, wanted) in results.items() if computed}
    _record(target, gaps)
    assert {name: gap for name, gap in gaps.items() if gap > BOUND} == {}
    assert set(gaps) == set(SOURCES.values())


def _record(target: str, gaps: dict[str, float]) -> None:
    """With CKPTKIT_RESUME_TABLE set, keep the numbers for the README's table (tests/resume/table.py)."""
    path = os.environ.get("CKPTKIT_RESUME_TABLE")
    if path:
        file = Path(path)
        table = json.loads(file.read_text()) if file.exists() else {}
        table[target] = gaps
        file.write_text(json.dumps(table, indent=1))
