"""plain: roles by their names, checked by what is there; what has a role's name and is something else is kept."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.core.checkpoint import Contents
from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor
from ckptkit.core.tree import Opaque
from ckptkit.dialects import dialects, plain

T = Tensor.at(Constant(b""), (2,), "float32")
MODEL = {"a.w": T, "a.b": T}
OPTIMIZER = {"state": {0: {"exp_avg": T}}, "param_groups": [{"params": [0, 1]}]}


def contents(tree: Any, format: str = "full") -> Contents:
    return Contents(format, tree, "")


@pytest.mark.parametrize(
    "tree", [MODEL, {"model": MODEL}, {"net": MODEL, "opt": OPTIMIZER}, {**MODEL, "q": Opaque("")}]
)
def test_claimed(tree: Any) -> None:
    assert plain.claims(contents(tree))
    others = [
        d.NAME for d in dialects().values() if d.NAME != "plain" and getattr(d, "claims", lambda c: 0)(contents(tree))
    ]
    assert others == []


@pytest.mark.parametrize("tree", [{}, [], None, T, {"model": {}}, {"model": {"deep": MODEL}}, {"app": {"model": MODEL}},
                                  {"x": MODEL}, {"model": "resnet50"}])  # fmt: skip
def test_not_claimed(tree: Any) -> None:
    assert plain.claims(contents(tree)) is None
    assert plain.claims(contents({"model": MODEL}, "zero")) is None


def test_roles_and_their_usual_names() -> None:
    state = plain.read({"": contents({"state_dict": MODEL, "optim": OPTIMIZER, "lr_scheduler": {"last_epoch": 1},
                                      "global_step": 7, "epoch": 2, "ema": MODEL})})  # fmt: skip
    assert dict(state.model) == MODEL and state.optimizer == OPTIMIZER
    assert state.extras == {"scheduler": {"last_epoch": 1}, "step": 7, "epoch": 2, "ema": MODEL}


def test_two_names_of_one_role_keep_their_own() -> None:
    state = plain.read({"": contents({"model": MODEL, "iteration": 6, "step": 7})})
    assert state.extras == {"iteration": 6, "step": 7}


def test_a_roles_name_for_something_else() -> None:
    tree = {"state_dict": MODEL, "model": "resnet50", "optimizer": {"d": OPTIMIZER, "g": OPTIMIZER}, "master": True}
    state = plain.read({"": contents(tree)})
    assert dict(state.model) == MODEL and state.optimizer is None and state.masters == {}
    assert state.extras == {"model_": "resnet50", "optimizer_": tree["optimizer"], "master_": True}
    (written,) = plain.write(state, "full").values()
    assert written.tree["model"] == MODEL and plain.read({"": written}).extras == state.extras


def test_write_is_the_mirror_of_read() -> None:
    tree = {"model": MODEL, "optimizer": OPTIMIZER, "master": {"a.w": T}, "scheduler": {"x": 1}, "step": 3}
    state = plain.read({"": contents(tree)})
    (written,) = plain.write(state, "full").values()
    assert written.tree == tree
