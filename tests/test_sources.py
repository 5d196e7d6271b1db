"""Every fixture that a real framework wrote is opened and holds what the live run held, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.transform import same_value
from ckptkit.errors import AmbiguousError
from fixtures.catalog import CATALOG, Fixture

from .truth import differences, truth_of

pytestmark = pytest.mark.slow
BY_NAME = {fixture.name: fixture for fixture in CATALOG}


@pytest.mark.parametrize("fixture", CATALOG, ids=lambda fixture: fixture.name)
def test_holds_what_the_run_held(fixture: Fixture, fixture_dir: Callable[[str], Path]) -> None:
    truth = truth_of(fixture_dir(fixture.name))
    checkpoint = ckptkit.open(truth.path, model=truth.model)
    assert differences(checkpoint, truth) == []
    assert (checkpoint.format, checkpoint.dialect) == (fixture.format, fixture.dialect)
    if checkpoint.step is not None:
        assert checkpoint.step == truth.info["step"]
    scheduler = checkpoint.extras.get("scheduler")
    if scheduler is not None and truth.info["scheduler"]:
        lambdas = {"lr_lambdas"}  # functions, which torch itself saves as None
        said = {key: value for key, value in scheduler.items() if key not in lambdas}
        # Some frameworks keep less of it (torchtitan: the epoch alone); what they keep must be right.
        assert said and said.keys() <= truth.info["scheduler"].keys()
        assert same_value(said, {key: truth.info["scheduler"][key] for key in said})


def test_the_comparison_sees_one_swapped_tensor(fixture_dir: Callable[[str], Path]) -> None:
    truth = truth_of(fixture_dir("ddp-full"))
    one, other = ("blocks.0.query.weight", "exp_avg"), ("blocks.1.query.weight", "exp_avg")
    truth.tensors[one], truth.tensors[other] = truth.tensors[other], truth.tensors[one]
    found = differences(ckptkit.open(truth.path, model=truth.model), truth)
    assert found == [f"{fqn}[{slot}]: values differ" for fqn, slot in (one, other)]


def test_ids_that_fit_two_parameters_are_an_error_that_names_both(fixture_dir: Callable[[str], Path]) -> None:
    """The fixture has a frozen bias of the shape of trained ones: only the model tells them apart."""
    truth = truth_of(fixture_dir("ddp-full"))
    with pytest.raises(AmbiguousError) as caught:
        ckptkit.open(truth.path)
    assert "may be" in caught.value.what and "--param-names" in caught.value.hint
    names = [name for group in truth.info["param_groups"] for name in group["params"]]
    assert differences(ckptkit.open(truth.path, param_names=names), truth) == []


def test_tied_weights_read_as_their_owner(fixture_dir: Callable[[str], Path]) -> None:
    truth = truth_of(fixture_dir("ddp-full"))
    checkpoint = ckptkit.open(truth.path, model=truth.model)
    for alias, owner in truth.info["aliases"].items():
        assert torch.equal(checkpoint.read(alias), checkpoint.read(owner))
        assert checkpoint.aliases[alias] == owner
