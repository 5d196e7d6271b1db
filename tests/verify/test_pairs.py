"""The code form on pairs that `migrate` is tested with: the rewritten script is equal, and one broken by hand is not.

Pairs that use the most of the recorder are run; CKPTKIT_ALL_PAIRS=1 runs every pair that there is (minutes).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptkit.errors import Exit
from ckptkit.verify.report import Finding, Report, judge
from ckptkit.verify.script_detect import detect_launch
from ckptkit.verify.script_launch import Launched, Script, run_script
from ckptkit.verify.tolerance import tolerance_for

from .breakages import breakage_for
from .warm_start import warm_start

PAIRS = Path(__file__).parents[2] / "fixtures" / "scripts"
CHOSEN = ("mixed_precision", "no_sync", "optimizer_state_dict", "summon_full_params", "ddp_process_group")
NAMES = sorted(path.parent.name for path in PAIRS.glob("*/after.py"))
CUDA = {"comm_hook": "FSDP1's hook records CUDA streams"}
# Caught, and named after what the recorder sees of DeepSpeed: stage 0 tells no norm before clipping (and the update
# ratio happens to be 1.99); the bf16 pair may be named either way.
NAMED_OTHERWISE = {
    "deepspeed_launch": {"gradient scale"},
    "deepspeed_precision": {"clipping missing", "gradient scale"},
}
STEPS = 5  # some pairs resume after three


def run(path: Path) -> Launched:
    launch = detect_launch(path)[0]
    return run_script(Script(path, (), launch, 2, STEPS, device="cpu", timeout=180, python_path=(str(PAIRS),)))


def findings(before: Launched, after: Launched) -> tuple[Finding, ...]:
    """One a rank, in the tolerance of what the original computes in."""
    assert before.complete, before.traces[0].reason
    assert len(before.traces) == len(after.traces) == 2, after.traces[0].reason
    bounds = tolerance_for(before.notes.get("compute_dtype", "fp32"))
    return tuple(judge(ours, theirs, bounds) for ours, theirs in zip(before.traces, after.traces, strict=True))


def exit_code(found: tuple[Finding, ...]) -> int:
    return Report("code", "a pair", found, {}).exit_code


@pytest.mark.parametrize("name", NAMES)
def test_each_pair_can_be_broken(name: str) -> None:
    text = (PAIRS / name / "after.py").read_text(encoding="utf-8")
    found = breakage_for(name, text)
    assert found is not None, "add what breaks this script to breakages.py"
    assert found[1] != text
    compile(found[1], name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES if os.environ.get("CKPTKIT_ALL_PAIRS") else CHOSEN)
def test_a_pair_is_equal_and_a_broken_one_is_not(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in CUDA:
        pytest.skip(f"needs CUDA: {CUDA[name]}")
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)  # some pairs save checkpoints
    found = breakage_for(name, (PAIRS / name / "after.py").read_text(encoding="utf-8"))
    assert found is not None
    breakage, text = found
    broken = tmp_path / "broken.py"
    broken.write_text(text, encoding="utf-8")
    with warm_start():
        before, after, wrong = run(PAIRS / name / "before.py"), run(PAIRS / name / "after.py"), run(broken)
    right = findings(before, after)
    assert [finding.comparison.verdict for finding in right] == ["equal", "equal"], right[0].diagnosis
    assert exit_code(right) == Exit.OK
    assert all(trace.initial for trace in (*before.traces, *after.traces))
    caught = findings(before, wrong)
    assert exit_code(caught) == Exit.FINDINGS
    assert {f.comparison.verdict for f in caught} == {"mismatch"}, f"{breakage.name} is not seen"
    causes = {f.diagnosis.cause for f in caught if f.diagnosis}
    expected = NAMED_OTHERWISE.get(name, set(breakage.causes))
    assert causes and causes <= expected, (
        breakage.name,
        [f.diagnosis for f in caught],
    )
