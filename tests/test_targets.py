"""Every source converts to every target that stands for itself, and the target holds what the live run held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.core.transform import same_value
from fixtures.catalog import CATALOG, Fixture

from .truth import differences, truth_of

pytestmark = pytest.mark.slow
TARGETS: dict[str, dict[str, Any]] = {
    "full": {"to": "full"},
    "full-ids": {"to": "full", "optimizer_keys": "id", "prefix": "module."},
    "safetensors": {"to": "safetensors", "optimizer": True, "max_shard_size": 20_000},
    "dcp": {"to": "dcp"},
    "dcp-ws3": {"to": "dcp", "world_size": 3},
    "dcp-flat": {"to": "dcp", "world_size": 2, "flat_optimizer": True},
}


# Every source goes to these; the other forms of a target are shown for one source of each kind.
FOR_ALL = ("full", "safetensors", "dcp-ws3")
KINDS = ("ddp-full", "fsdp1-full", "fsdp1-local", "fsdp2-dcp", "fsdp2-ranks", "zero1-bf16", "zero3", "universal-zero3")
CASES = [(fixture, target) for fixture in CATALOG for target in TARGETS if target in FOR_ALL or fixture.name in KINDS]


@pytest.mark.parametrize(("fixture", "target"), CASES, ids=lambda case: getattr(case, "name", case))
def test_target_holds_what_the_run_held(
    fixture: Fixture, target: str, fixture_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    truth = truth_of(fixture_dir(fixture.name))
    options = TARGETS[target]
    source = ckptkit.open(truth.path, model=truth.model)
    out = tmp_path / "out"
    # Objects of unknown classes in a source are drops by name; nothing else may be.
    report = ckptkit.convert(truth.path, out, model=truth.model, allow_drop=bool(source.drops), **options)
    assert {drop.what for drop in report.plan.drops} <= {drop.what for drop in source.drops}
    names = [name for group in source.param_groups for name in group["params"]]
    written = ckptkit.open(out, param_names=names or None)
    assert differences(written, truth, best=True) == []
    for name in source.extras:
        assert name in written.extras
        assert same_value(_plain(written.extra(name)), _plain(source.extra(name))), name


def _plain(tree: Any) -> Any:
    """Tensors as lists, so that trees compare as values."""
    from ckptkit.core.tree import mapped

    return mapped(tree, lambda path, leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf)
