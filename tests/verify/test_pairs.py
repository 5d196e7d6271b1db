"""The code form on pairs that `migrate` is tested with: the rewritten script is equal, and one broken by hand is not.

Five pairs that use the most of the recorder are run; CKPTKIT_ALL_PAIRS=1 runs every pair that there is (minutes).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptkit.verify.report import judge
from ckptkit.verify.script_detect import detect_launch
from ckptkit.verify.script_launch import Launched, Script, run_script
from ckptkit.verify.tolerance import tolerance_for

pytestmark = pytest.mark.slow
PAIRS = Path(__file__).parents[2] / "fixtures" / "scripts"
CHOSEN = ("mixed_precision", "no_sync", "grad_scaler", "optimizer_state_dict", "summon_full_params")
NAMES = sorted(path.parent.name for path in PAIRS.glob("*/after.py"))
STEPS = 3


def run(path: Path) -> Launched:
    launch = detect_launch(path)[0]
    return run_script(Script(path, (), launch, 2, STEPS, device="cpu", timeout=180, python_path=(str(PAIRS),)))


@pytest.mark.parametrize("name", NAMES if os.environ.get("CKPTKIT_ALL_PAIRS") else CHOSEN)
def test_a_pair_is_equal_and_a_broken_one_is_not(name: str, tmp_path: Path) -> None:
    before, after = run(PAIRS / name / "before.py"), run(PAIRS / name / "after.py")
    assert before.complete and after.complete, (before.traces[0].reason, after.traces[0].reason)
    assert len(before.traces) == len(after.traces) == 2
    bounds = tolerance_for(before.notes.get("compute_dtype", "fp32"))
    for ours, theirs in zip(before.traces, after.traces, strict=True):
        finding = judge(ours, theirs, bounds)
        assert finding.comparison.verdict == "equal", (finding.diagnosis, finding.comparison.first)
        assert ours.initial and theirs.initial
    text = (PAIRS / name / "after.py").read_text(encoding="utf-8")
    if "loss.backward()" not in text:
        return
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace("loss.backward()", "(loss * 2).backward()"), encoding="utf-8")
    finding = judge(before.traces[0], run(broken).traces[0], bounds)
    assert finding.comparison.verdict == "mismatch" and finding.diagnosis is not None
    assert finding.diagnosis.cause == "gradient scale"
