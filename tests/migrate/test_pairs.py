"""Every before/after pair under fixtures/scripts: the rewrite is byte for byte the expected one, and both train
alike.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import libcst as cst
import pytest
from harness import SCRIPTS, Runner

from ckptkit import migrate
from ckptkit.migrate import Changed, Grade

PAIRS = sorted(path.parent for path in SCRIPTS.rglob("before.py"))
IDS = [str(pair.relative_to(SCRIPTS)) for pair in PAIRS]
_BOUND = re.compile(r"^# bound: (\S+) ", re.MULTILINE)


@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
def test_before_becomes_after(pair: Path) -> None:
    report = migrate.run([pair / "before.py"])
    [outcome] = report.outcomes
    assert isinstance(outcome, Changed), outcome
    assert outcome.after == (pair / "after.py").read_text()


@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
def test_a_second_run_changes_nothing(pair: Path) -> None:
    assert not migrate.run([pair / "after.py"]).changed


@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
def test_no_rule_gives_the_same_bytes(pair: Path) -> None:
    for path in (pair / "before.py", pair / "after.py"):
        assert cst.parse_module(path.read_bytes()).bytes == path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
def test_both_train_alike(pair: Path, runner: Runner, tmp_path: Path) -> None:
    grades = {finding.grade for finding in migrate.run([pair / "before.py"]).findings}
    text = (pair / "before.py").read_text()
    bound = _BOUND.search(text)
    if "\n# needs: cuda" in text and not Path("/dev/nvidia0").exists():
        pytest.skip("FSDP1 itself needs a GPU for this")
    before = runner.run(pair / "before.py", cwd=_folder(tmp_path / "before"))
    after = runner.run(pair / "after.py", cwd=_folder(tmp_path / "after"))
    if bound is None:
        assert Grade.NUMERICS not in grades, "a pair with other numbers states its bound: `# bound: 1e-3 why`"
    assert_alike(before, after, float(bound.group(1)) if bound else 0.0)


def assert_alike(before: dict[str, Any], after: dict[str, Any], bound: float) -> None:
    """Assert that losses, weights and all else recorded agree: to the last bit, or within a relative bound."""
    assert before["losses"], "nothing was trained"
    assert len(set(before["losses"])) > 1 or len(before["losses"]) == 1, "the loss never moved"
    assert before.keys() == after.keys()
    assert before["weights"].keys() == after["weights"].keys()
    difference = largest_difference(before, after)
    assert difference <= bound, f"differs by {difference:.3g}, allowed {bound:.3g}"


def largest_difference(before: Any, after: Any) -> float:
    """Largest difference of two records, relative to the largest value of each list."""
    if isinstance(before, dict):
        return max((largest_difference(before[key], after[key]) for key in before), default=0.0)
    if isinstance(before, list) and len(before) == len(after) and all(isinstance(x, (int, float)) for x in before):
        scale = max((abs(x) for x in before), default=0.0) or 1.0
        gap = max((abs(a - b) for a, b in zip(before, after, strict=True)), default=0.0)
        return math.inf if math.isnan(gap) else gap / scale
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return max((largest_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)
    if isinstance(before, float) and isinstance(after, float):
        return largest_difference([before], [after])
    return 0.0 if before == after else math.inf


def _folder(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
