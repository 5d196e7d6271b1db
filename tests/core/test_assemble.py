"""Assemble and disassemble: names, ties, ids, groups and extras come back; what is ambiguous or lost says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.assemble import Assembled, Hints, assemble
from ckptkit.core.checkpoint import Checkpoint, ModelFacts, State
from ckptkit.core.disassemble import disassemble
from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor, TensorKey
from ckptkit.core.transform import renamed
from ckptkit.core.tree import Opaque, TensorRef
from ckptkit.errors import AmbiguousError, SourceError


def tensor(*shape: int, dtype: str = "float32", storage: object = None) -> Tensor:
    return Tensor.at(Constant(b""), shape, dtype, storage=storage)


def adam(*shape: int, step: Any = None) -> dict[str, Any]:
    return {"step": tensor() if step is None else step, "exp_avg": tensor(*shape), "exp_avg_sq": tensor(*shape)}


def checkpoint_of(assembled: Assembled) -> Checkpoint:
    return Checkpoint(
        "", "full", "plain", (), 1, assembled.entries, assembled.param_groups, assembled.optimizer_values,
        assembled.aliases, assembled.extras, tuple(assembled.drops),
    )  # fmt: skip


MODEL = {
    "embed.weight": tensor(5, 4, storage="tied"),
    "layer.weight": tensor(4, 4),
    "layer.bias": tensor(4),
    "norm.running_mean": tensor(4),
    "norm.running_var": tensor(4),
    "norm.num_batches_tracked": tensor(dtype="int64"),
    "head.weight": tensor(5, 4, storage="tied"),
}
NAMES = ["embed.weight", "layer.weight", "layer.bias"]
SHAPES = [(5, 4), (4, 4), (4,)]


def optimizer(keys: list[Any]) -> dict[str, Any]:
    """Two groups: the matrices decay, the bias does not."""
    return {
        "state": {key: adam(*shape) for key, shape in zip(keys, SHAPES, strict=True)},
        "param_groups": [
            {"lr": 0.1, "weight_decay": 0.1, "params": keys[:2]},
            {"lr": 0.1, "weight_decay": 0.0, "params": keys[2:]},
        ],
    }


@pytest.mark.parametrize("prefix", ["", "module.", "_forward_module.module.", "_orig_mod."])
@pytest.mark.parametrize("keys", [NAMES, [0, 1, 2], ["0", "1", "2"]], ids=["names", "ids", "ids as text"])
def test_all_ways_to_name_become_one(prefix: str, keys: list[Any]) -> None:
    named = [prefix + key if "." in str(key) else key for key in keys]
    state = State({prefix + name: value for name, value in MODEL.items()}, optimizer(named))
    found = assemble(state)
    assert {key.fqn for key in found.entries if key.slot == "value"} == set(MODEL) - {"head.weight"}
    assert found.aliases == {"head.weight": "embed.weight"}
    assert [group["params"] for group in found.param_groups] == [NAMES[:2], NAMES[2:]]
    assert [group["weight_decay"] for group in found.param_groups] == [0.1, 0.0]
    for name, shape in zip(NAMES, SHAPES, strict=True):
        assert found.entries[TensorKey(name, "exp_avg")].spec.shape == shape
    roles = {key.fqn: value.spec.role for key, value in found.entries.items() if key.slot == "value"}
    assert {name for name, role in roles.items() if role == "param"} == set(NAMES)
    assert {name for name, role in roles.items() if role == "buffer"} == {n for n in MODEL if n.startswith("norm")}


@pytest.mark.parametrize("keys", ["fqn", "id"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_disassemble_is_the_mirror(keys: Any, prefix: str) -> None:
    """What is written from a checkpoint assembles to the same checkpoint."""
    extras = {"scheduler": {"last_epoch": 3}, "rng": {"cpu": tensor(8, dtype="uint8")}, "step": 7}
    first = assemble(State(MODEL, optimizer(NAMES), extras=extras))
    state = disassemble(checkpoint_of(first), optimizer_keys=keys, prefix=prefix)
    assert state.model[f"{prefix}head.weight"] is state.model[f"{prefix}embed.weight"]
    again = assemble(State(state.model, state.optimizer, state.masters, state.extras, state.aliases))
    assert again.prefix == prefix and replace(again, prefix="") == first


@given(st.permutations(range(6)), st.integers(0, 6))
def test_ids_run_through_all_groups(order: list[int], split: int) -> None:
    model = {f"p{i}": tensor(i + 1) for i in range(6)}
    names = [f"p{i}" for i in order]
    groups = [{"lr": 1.0, "params": names[:split]}, {"lr": 2.0, "params": names[split:]}]
    groups = [group for group in groups if group["params"]]
    state = {name: {"momentum_buffer": model[name]} for name in names}
    first = assemble(State(model, {"state": state, "param_groups": groups}))
    written = disassemble(checkpoint_of(first), optimizer_keys="id").optimizer
    assert written is not None
    assert [key for group in written["param_groups"] for key in group["params"]] == list(range(6))
    again = assemble(State(model, written), Hints(tuple(names)))
    assert (again.param_groups, again.entries) == (first.param_groups, first.entries)


def test_equal_shapes_with_a_frozen_one_between_are_two_readings() -> None:
    model = {name: tensor(4) for name in ("a", "b", "c")}
    state = {"state": {0: adam(4), 1: adam(4)}, "param_groups": [{"params": [0, 1]}]}
    with pytest.raises(AmbiguousError):
        assemble(State(model, state))
    facts = ModelFacts({"a": (4,), "b": (4,), "c": (4,)}, {}, {}, frozenset({"b"}))
    for hints in (Hints(("a", "c")), Hints(model=facts)):
        found = assemble(State(model, state), hints)
        assert found.param_groups[0]["params"] == ["a", "c"]
        assert found.entries[TensorKey("b")].spec.role == "frozen"


def test_an_unordered_model_needs_to_be_told_the_order() -> None:
    state = State({"a": tensor(4)}, {"state": {}, "param_groups": [{"params": [0]}]}, ordered=False)
    with pytest.raises(AmbiguousError, match="order"):
        assemble(state)
    assert assemble(state, Hints(("a",))).param_groups[0]["params"] == ["a"]


def test_names_that_torch_noted_beside_the_ids_are_taken() -> None:
    model = {name: tensor(4) for name in ("a", "b", "c")}
    group = {"params": [0, 1], "param_names": ["module.c", "module.a"]}
    found = assemble(State({f"module.{n}": t for n, t in model.items()}, {"state": {}, "param_groups": [group]}))
    assert found.param_groups == [{"params": ["c", "a"]}]


def test_an_optimizer_without_groups() -> None:
    found = assemble(State(MODEL, {"state": {i: adam(*s) for i, s in enumerate(SHAPES)}}))
    assert found.entries[TensorKey("layer.bias", "exp_avg")].spec.shape == (4,)


def test_a_state_of_no_group_is_an_error() -> None:
    broken = optimizer([0, 1, 2])
    broken["state"][7] = adam(4)
    with pytest.raises(SourceError, match="1 ids that no group names"):
        assemble(State(MODEL, broken))


def test_an_optimizer_of_another_model_is_an_error_that_names_the_strangers() -> None:
    with pytest.raises(SourceError) as caught:
        assemble(State(MODEL, {"state": {"other.weight": adam(4)}, "param_groups": []}))
    assert caught.value.faults == ("other.weight",) and caught.value.hint


def test_given_names_that_do_not_fit_the_shapes() -> None:
    with pytest.raises(SourceError) as caught:
        assemble(State(MODEL, optimizer([0, 1, 2])), Hints(("layer.weight", "embed.weight", "layer.bias")))
    assert len(caught.value.faults) == 2


def test_two_names_that_become_one() -> None:
    with pytest.raises(SourceError, match="one name"):
        assemble(State({"a._orig_mod.w": tensor(1), "a.w": tensor(1)}))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"c": "b", "b": "a"}, {"c": "a", "b": "a"}),  # a chain
        ({"a": "a"}, {}),  # tied to itself
        ({"a": "b", "b": "a"}, {"b": "a"}),  # a circle: one of them stays
        ({"b": "gone"}, {}),
    ],
)
def test_no_tie_loses_a_tensor(said: dict[str, str], expected: dict[str, str]) -> None:
    found = assemble(State({name: tensor(2) for name in "abc"}, aliases=said))
    assert found.aliases == expected
    assert {key.fqn for key in found.entries} == set("abc") - set(expected)


def test_ties_of_different_shapes_are_refused() -> None:
    with pytest.raises(SourceError) as caught:
        assemble(State({"a": tensor(2), "b": tensor(3)}, aliases={"b": "a"}))
    assert caught.value.faults == ("b is (3,), a is (2,)",)


def test_empty_tensors_are_never_tied() -> None:
    found = assemble(State({"a": tensor(0, 2, storage="one"), "b": tensor(0, 2, storage="one")}))
    assert found.aliases == {}


def test_objects_of_unknown_classes_are_drops_alone() -> None:
    extras = {"args": Opaque("argparse.Namespace"), "rng": [1, Opaque("x.Y"), {"deep": Opaque("x.Z"), "kept": 2}]}
    state = optimizer(NAMES)
    state["state"]["layer.bias"]["odd"] = Opaque("q.Q")
    state["param_groups"][0]["hook"] = Opaque("h.H")
    found = assemble(State({**MODEL, "quantized": Opaque("t.Q"), "m._extra_state": Opaque("e.E")}, state, {}, extras))
    assert found.extras == {"rng": [1, None, {"kept": 2}], "model_extra_state": {}}
    assert {drop.what for drop in found.drops} == {
        "args", "rng.1", "rng.2.deep", "optimizer state odd of layer.bias", "param_groups.0.hook",
        "model_extra_state.quantized", "model_extra_state.m._extra_state",
    }  # fmt: skip
    assert all("imported" in drop.reason or "carried" in drop.reason for drop in found.drops)


def test_tensors_in_extras_and_groups_are_entries() -> None:
    state = optimizer(NAMES)
    state["param_groups"][0]["lr"] = tensor()
    found = assemble(State(MODEL, state, extras={"rng": {"cpu": [tensor(8, dtype="uint8")]}}))
    key = TensorKey("rng.cpu.0", "extra")
    assert found.extras["rng"] == {"cpu": [TensorRef(key)]} and found.entries[key].spec.dtype == "uint8"
    assert found.param_groups[0]["lr"] == TensorRef(TensorKey("param_groups.0.lr", "extra"))


@pytest.mark.parametrize("step", [3, 3.0])
def test_a_step_that_is_a_number_becomes_the_tensor_that_torch_makes_of_it(step: float) -> None:
    found = assemble(State({"w": tensor(2)}, {"state": {"w": adam(2, step=step)}, "param_groups": []}))
    entry = found.entries[TensorKey("w", "step")]
    data = bytearray(4)
    entry.pieces[0].place.read_into(0, memoryview(data))
    assert (entry.spec.dtype, entry.spec.shape, bytes(data)) == ("float32", (), b"\x00\x00\x40\x40")


def test_two_moments_in_one_storage_are_a_warning() -> None:
    shared = tensor(2, storage="same")
    state = {"state": {"w": {"exp_avg": shared, "exp_avg_sq": shared}}, "param_groups": []}
    found = assemble(State({"w": tensor(2)}, state))
    assert len(found.warnings) == 1 and "exp_avg and exp_avg_sq of w" in found.warnings[0]


def test_tensors_in_lists_of_an_optimizer_state_come_back() -> None:
    """SOAP, Shampoo and LBFGS keep lists of tensors: entries like others, renamed with their parameter."""
    factors = [tensor(4, 4), None, {"inverse": tensor(2)}]
    said = {"state": {"a": {"GG": factors, "step": tensor(), "odd": [Opaque("my.Thing")]}}, "param_groups": []}
    out = assemble(State({"a": tensor(4, 2)}, said))
    assert {key.slot for key in out.entries} == {"value", "step", "GG.0", "GG.2.inverse"}
    assert [drop.what for drop in out.drops] == ["optimizer state odd.0 of a"]
    back = disassemble(renamed(checkpoint_of(out), lambda name: f"x.{name}")).optimizer
    assert back is not None
    first, nothing, nested = back["state"]["x.a"]["GG"]
    assert first.spec.shape == (4, 4) and nothing is None and nested["inverse"].spec.shape == (2,)


@pytest.mark.parametrize("beside", ["", "module."])
def test_a_module_that_is_called_module_under_ddp(beside: str) -> None:
    """Names beside the model's come with DDP's prefix or without it; the module's own name is no prefix."""
    model = {"module.module.w": tensor(2), "module.step": tensor(2)}
    names = [f"{beside}{name}" for name in ("module.w", "step")]
    groups = [{"lr": 0.1, "params": [0, 1]}]
    by_id = {"state": {0: adam(2), 1: adam(2)}, "param_groups": groups}
    by_name = {"state": {name: adam(2) for name in names}, "param_groups": [{"lr": 0.1, "params": names}]}
    noted = {"state": by_id["state"], "param_groups": [{**groups[0], "param_names": names}]}
    for optimizer, hints in ((by_id, Hints(tuple(names))), (by_name, None), (noted, None)):
        out = assemble(State(model, optimizer), hints)
        assert [group["params"] for group in out.param_groups] == [["module.w", "step"]]


def test_a_model_says_which_prefix_is_its_own() -> None:
    own, plain = ModelFacts({"module.w": (2,)}, {}, {}), ModelFacts({"w": (2,)}, {}, {})
    cases = [("module.w", own, "module.w"), ("module.module.w", own, "module.w")]
    for name, facts, found in [*cases, ("module.w", None, "w"), ("module.w", plain, "w")]:
        out = assemble(State({name: tensor(2)}), Hints(model=facts))
        assert [key.fqn for key in out.entries] == [found]
