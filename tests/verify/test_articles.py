"""The scripts that first texts about DDP, FSDP and DeepSpeed show, whole: against their migration, and broken by hand.

One of each framework is run; CKPTKIT_ALL_PAIRS=1 runs them all (minutes).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from ckptkit.cli.verify import migrate_copy

from ckptkit import migrate
from ckptkit.errors import Exit
from ckptkit.verify.script import ScriptOptions, _rewritten, verify_scripts
from ckptkit.verify.script_launch import Launched, Script, run_script

from .article_stages import ARTICLES, STAGES, TOLD, TUNED, changed, stage
from .breakages import breakage_for
from .test_pairs import exit_code, findings
from .warm_start import warm_start

STEPS = 4
WHOLE = ("ddp", "size_based", "deepspeed_json")
NAMES = (*WHOLE, *(f"a_{name}" for name in STAGES))
CHOSEN = ("ddp", "a_checkpoint", "a_hybrid_shard")
OPTIONS = ScriptOptions(steps=STEPS, device="cpu", timeout=180)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every script and stage beside the configuration, as the current folder."""
    for path in ARTICLES.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    for name in STAGES:
        (tmp_path / f"a_{name}.py").write_text(stage(name), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def migrated(folder: Path, name: str) -> tuple[Path, int]:
    """The migration of a script, beside it, and how many places are left for a person."""
    source = folder / f"{name}.py"
    left = len(migrate.run([source]).manual)
    target = Path(shutil.copy(source, folder / f"{name}_migrated.py"))
    migrate_copy(target)
    assert "fully_shard" in target.read_text(encoding="utf-8")
    return target, left


def run(path: Path, name: str) -> Launched:
    """FSDP1 scripts neither seed nor broadcast: they get one seed for the weights, as `verify_scripts` gives them."""
    ranks = "same" if name.startswith("a_") or name == "size_based" else "apart"
    return run_script(Script(path, (), "torchrun", 2, STEPS, device="cpu", timeout=180, seed_ranks=ranks))


@pytest.mark.parametrize("name", NAMES)
def test_each_script_is_migrated_and_can_be_broken(folder: Path, name: str) -> None:
    target, left = migrated(folder, name)
    assert left == 0
    text = target.read_text(encoding="utf-8")
    found = breakage_for(name, text)
    assert found is not None and found[1] != text
    compile(found[1], name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES if os.environ.get("CKPTKIT_ALL_PAIRS") else CHOSEN)
def test_a_script_equals_its_migration_and_a_broken_one_does_not(folder: Path, name: str) -> None:
    if name == "deepspeed_json":
        pytest.importorskip("deepspeed")
    target, _ = migrated(folder, name)
    found = breakage_for(name, target.read_text(encoding="utf-8"))
    assert found is not None
    breakage, text = found
    broken = folder / "broken.py"
    broken.write_text(text, encoding="utf-8")
    with warm_start():
        before, after, wrong = run(folder / f"{name}.py", name), run(target, name), run(broken, name)
    right = findings(before, after)
    assert [finding.comparison.verdict for finding in right] == ["equal", "equal"], right[0].diagnosis
    assert exit_code(right) == Exit.OK and all(len(trace.steps) == STEPS for trace in before.traces)
    caught = findings(before, wrong)
    assert exit_code(caught) == Exit.FINDINGS, f"{breakage.name} is not seen"
    causes = {f.diagnosis.cause for f in caught if f.diagnosis}
    assert causes and causes <= set(breakage.causes), (breakage.name, [f.diagnosis for f in caught])


def test_code_that_uses_fully_shard_already_is_left_alone(folder: Path) -> None:
    report = migrate.run([folder / "fsdp2.py"])
    assert not report.changed and not report.findings


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CKPTKIT_ALL_PAIRS"), reason="CKPTKIT_ALL_PAIRS=1 runs all stages")
@pytest.mark.parametrize("name", TOLD)
def test_what_the_text_tells_and_torch_refuses_trains_once_migrated(folder: Path, name: str) -> None:
    source = folder / f"{name}.py"
    told = folder / "told.py"
    told.write_text(changed(source.read_text(encoding="utf-8"), TOLD[name]), encoding="utf-8")
    target, left = migrated(folder, "told")
    assert left == 0
    with warm_start():
        before, refused, after = run(source, name), run(told, name), run(target, name)
    assert not any(trace.steps for trace in refused.traces), "FSDP1 takes it: the stage may be told as it is"
    found = findings(before, after)
    assert [finding.comparison.verdict for finding in found] == ["equal", "equal"], found[0].diagnosis


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CKPTKIT_ALL_PAIRS"), reason="CKPTKIT_ALL_PAIRS=1 runs all stages")
def test_ddp_as_the_text_tunes_it_equals_its_migration(folder: Path) -> None:
    tuned = folder / "tuned.py"
    tuned.write_text(changed((folder / "ddp.py").read_text(encoding="utf-8"), TUNED), encoding="utf-8")
    target, left = migrated(folder, "tuned")
    assert left == 0 and "set_reduce_scatter_unused_params(True)" in target.read_text(encoding="utf-8")
    with warm_start():
        before, after = run(tuned, "ddp"), run(target, "ddp")
    found = findings(before, after)
    assert [finding.comparison.verdict for finding in found] == ["equal", "equal"], found[0].diagnosis


@pytest.mark.slow
def test_the_move_to_fsdp2_that_the_text_shows_lacks_a_broadcast(folder: Path) -> None:
    with warm_start():
        report = verify_scripts(folder / "ddp.py", folder / "fsdp2.py", OPTIONS)
    assert report.exit_code == Exit.FINDINGS
    assert [f.diagnosis.cause for f in report.findings if f.diagnosis] == ["no rank-0 broadcast"] * 2


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CKPTKIT_ALL_PAIRS"), reason="CKPTKIT_ALL_PAIRS=1 runs all stages")
@pytest.mark.parametrize("name", ["size_based", "a_basic", "a_cpu_offload"])
def test_an_original_without_broadcast_is_told_so(folder: Path, name: str) -> None:
    with warm_start():
        report = verify_scripts(folder / f"{name}.py", None, OPTIONS, rewrite=migrate_copy)
    assert report.exit_code == Exit.OK, report.findings
    assert any("neither seeds its ranks alike nor broadcasts" in note for note in report.notes)


def test_the_copy_that_is_migrated_has_the_configuration_beside_it(folder: Path) -> None:
    (folder / "copy").mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "more.yaml").write_text("a: 1\n", encoding="utf-8")
    copy, note = _rewritten(folder / "deepspeed_json.py", folder / "copy", migrate_copy)
    assert "left for a person" not in note and "= initialize(" not in copy.read_text(encoding="utf-8")
    assert (copy.parent / "ds_config.json").exists() and (copy.parent / "sub" / "more.yaml").exists()
