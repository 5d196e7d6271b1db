"""Controls: with one rule switched off, or one of its lines gone, the comparison of before and after must fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SCRIPTS, RunError, Runner
from test_pairs import largest_difference

from ckptkit import migrate
from ckptkit.migrate import Changed

pytestmark = pytest.mark.slow


def migrated_without(rule: str, pair: str) -> str:
    [outcome] = migrate.run([SCRIPTS / pair / "before.py"], ignore=(rule,)).outcomes
    assert isinstance(outcome, Changed)
    return outcome.after


def difference(runner: Runner, folder: Path, pair: str, code: str) -> float:
    """Relative difference between the original's record and that of another text; infinite when it does not run."""
    script = folder / "control.py"
    script.write_text(code)
    before = runner.run(SCRIPTS / pair / "before.py", cwd=folder)
    try:
        after = runner.run(script, cwd=folder)
    except RunError:
        return float("inf")
    return largest_difference(before, after)


def test_the_optimizer_before_sharding_trains_nothing(runner: Runner, tmp_path: Path) -> None:
    assert (
        difference(runner, tmp_path, "optimizer_order", migrated_without("optimizer-order", "optimizer_order")) > 1e-3
    )


def test_casting_inputs_everywhere_is_seen(runner: Runner, tmp_path: Path) -> None:
    after = (SCRIPTS / "mixed_precision" / "after.py").read_text()
    code = after.replace(", cast_forward_inputs=False", "")
    assert code != after
    assert difference(runner, tmp_path, "mixed_precision", code) > 2e-2


def test_mixed_precision_left_out_is_seen(runner: Runner, tmp_path: Path) -> None:
    code = migrated_without("mixed-precision", "mixed_precision")
    assert difference(runner, tmp_path, "mixed_precision", code) > 2e-2


def edit(pair: str, change: Callable[[str], str]) -> str:
    after = (SCRIPTS / pair / "after.py").read_text()
    changed = change(after)
    assert changed != after
    return changed


def test_a_missing_clip_is_seen(runner: Runner, tmp_path: Path) -> None:
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.2, norm_type=2.0)"
    assert (
        difference(runner, tmp_path, "gradient_clipping", edit("gradient_clipping", lambda s: s.replace(clip, "pass")))
        > 1e-4
    )


def test_gradients_that_are_never_reduced_are_seen(runner: Runner, tmp_path: Path) -> None:
    code = edit("no_sync", lambda s: s.replace("set_requires_gradient_sync(True)", "set_requires_gradient_sync(False)"))
    assert difference(runner, tmp_path, "no_sync", code) > 1e-4


def test_a_missing_division_is_seen(runner: Runner, tmp_path: Path) -> None:
    code = edit("no_sync", lambda s: s.replace("(loss / 3)", "loss"))
    assert difference(runner, tmp_path, "no_sync", code) > 1e-4


def test_the_broadcast_gives_all_ranks_the_weights_of_rank_0(runner: Runner, tmp_path: Path) -> None:
    pair = SCRIPTS / "sync_module_states"
    alike = runner.run(pair / "before.py", cwd=tmp_path)
    broadcast = runner.run(pair / "after.py", cwd=tmp_path, env={"SEEDS_DIFFER": "1", "SYNC": "1"})
    assert largest_difference(alike, broadcast) == 0.0
    patchwork = runner.run(pair / "after.py", cwd=tmp_path, env={"SEEDS_DIFFER": "1"})
    assert largest_difference(alike, patchwork) > 1e-2
