"""Changes before writing: names, weights or masters, dtypes; nothing is lost on the way without a word."""

from __future__ import annotations

import pytest

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.place import Constant
from ckptkit.core.spec import Role, Tensor, TensorKey
from ckptkit.core.transform import renamed, renaming, same_value, weights_only, with_dtype, with_weights
from ckptkit.errors import UsageError


def tensor(dtype: str = "bfloat16", role: Role = "param") -> Tensor:
    return Tensor.at(Constant(b""), (2,), dtype, role)


CHECKPOINT = Checkpoint(
    "", "full", "plain", (), 1,
    entries={
        TensorKey("m.w"): tensor(), TensorKey("m.w", "master"): tensor("float32"),
        TensorKey("m.w", "exp_avg"): tensor("float32", "optim"), TensorKey("m.f"): tensor(role="frozen"),
        TensorKey("m.b"): tensor("float32", "buffer"), TensorKey("m.n"): tensor("int64", "buffer"),
        TensorKey("rng.0", "extra"): tensor("uint8", "extra"),
    },
    param_groups=({"lr": 1.0, "params": ["m.w"]},),
    optimizer_values={"m.w": {"note": 1}},
    aliases={"m.tied": "m.w"},
)  # fmt: skip


def test_a_rename_goes_through_all_names_but_those_of_extras() -> None:
    out = renamed(CHECKPOINT, renaming("m.", ["^w$=weight", "(f|b)=x\\1"]))
    assert {str(key) for key in out.entries} == {"weight", "weight[master]", "weight[exp_avg]", "xf", "xb", "n",
                                                 "rng.0[extra]"}  # fmt: skip
    assert out.param_groups[0]["params"] == ["weight"] and out.optimizer_values == {"weight": {"note": 1}}
    assert out.aliases == {"tied": "weight"}


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        (["m\\.[fb]=z"], "m.f and m.b would both be z"),
        (["tied=b"], "m.b and m.tied would both be m.b"),
        (["^m\\.n$="], "m.n would have no name"),
    ],
)
def test_names_that_no_longer_tell_tensors_apart_are_refused(rules: list[str], fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        renamed(CHECKPOINT, renaming("", rules))
    assert fault in caught.value.faults and caught.value.why and caught.value.hint


@pytest.mark.parametrize("rule", ["no equals sign", "(=x", "a=\\1", "a=\\g<x>", "*=b"])
def test_a_rule_that_is_none_is_refused_before_anything_is_renamed(rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        renaming("", [rule])
    assert caught.value.why and caught.value.hint


def test_weights_only_keeps_what_the_model_holds() -> None:
    out = weights_only(CHECKPOINT)
    assert {key.slot for key in out.entries} == {"value", "master"} and not out.has_optimizer and not out.extras


def test_masters_take_the_place_of_the_weights_where_there_is_room_for_one() -> None:
    out = with_weights(CHECKPOINT, "master", keep_masters=False)
    assert out.tensors[TensorKey("m.w")].dtype == "float32" and out.tensors[TensorKey("m.w")].role == "param"
    assert TensorKey("m.w", "master") not in out.entries and out.drops == ()
    assert out.tensors[TensorKey("m.f")].dtype == "bfloat16"
    assert with_weights(CHECKPOINT, "master", keep_masters=True) is CHECKPOINT


def test_the_weights_as_held_leave_the_masters_as_a_named_drop() -> None:
    out = with_weights(CHECKPOINT, "value", keep_masters=False)
    assert out.tensors[TensorKey("m.w")].dtype == "bfloat16"
    assert [drop.what for drop in out.drops] == ["the fp32 masters of 1 parameters"]


def test_a_dtype_is_for_parameters_alone() -> None:
    out = with_dtype(with_weights(CHECKPOINT, "master", keep_masters=False), "float16", keep_masters=False)
    assert {str(key): spec.dtype for key, spec in out.tensors.items()} == {
        "m.w": "float16", "m.f": "float16", "m.b": "float32", "m.n": "int64", "m.w[exp_avg]": "float32",
        "rng.0[extra]": "uint8",
    }  # fmt: skip


def test_a_target_with_masters_keeps_them_beside_narrower_weights() -> None:
    plain = with_weights(CHECKPOINT, "master", keep_masters=False)
    out = with_dtype(plain, "bfloat16", keep_masters=True)
    assert out.tensors[TensorKey("m.w", "master")].dtype == "float32"
    assert out.tensors[TensorKey("m.w")].dtype == "bfloat16" and TensorKey("m.f", "master") not in out.entries
    back = with_dtype(CHECKPOINT, "float32", keep_masters=True)
    assert back.entries[TensorKey("m.w")].pieces == CHECKPOINT.entries[TensorKey("m.w", "master")].pieces
    assert TensorKey("m.w", "master") not in back.entries


def test_values_compare_as_values() -> None:
    nan = float("nan")
    assert same_value({"a": [1, (2, nan)]}, {"a": (1, [2, nan])}) and same_value(1, 1.0)
    for one, other in (({"a": 1}, {"a": 1, "b": 2}), ([1], [1, 2]), (True, 1), (0, False), (nan, 0.0), ("1", 1)):
        assert not same_value(one, other) and not same_value(other, one)
