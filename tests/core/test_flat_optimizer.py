"""The flat form of an optimizer's state dict: to the nested form and back, whatever dots the names have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.flat_optimizer import flattened_optimizer, is_flat, is_nested, nested_optimizer

names = st.lists(st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,2}){0,3}", fullmatch=True), unique=True, min_size=1,
                 max_size=6)  # fmt: skip


@given(names, st.lists(st.sampled_from([0.0, 0.1]), min_size=6, max_size=6))
def test_round_trip(fqns: list[str], decays: list[float]) -> None:
    nested = {
        "state": {fqn: {"exp_avg": index, "step": 3} for index, fqn in enumerate(fqns)},
        "param_groups": [
            {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": decay, "params": members}
            for decay in dict.fromkeys(decays[: len(fqns)])
            if (members := [fqn for fqn, own in zip(fqns, decays, strict=False) if own == decay])
        ],
    }
    flat = flattened_optimizer(nested)
    assert is_flat(flat) and is_nested(nested) and not is_flat(nested) and not is_nested(flat)
    assert nested_optimizer(flat) == nested
    assert nested_optimizer(nested) == nested


def test_a_parameter_whose_name_begins_with_anothers() -> None:
    flat = {"state.a.exp_avg": 1, "state.a.exp_avg.step": 2, "param_groups.a.lr": 1.0, "param_groups.a.exp_avg.lr": 1.0}
    assert nested_optimizer(flat)["state"] == {"a": {"exp_avg": 1}, "a.exp_avg": {"step": 2}}


def test_an_empty_dict_is_neither() -> None:
    assert not is_flat({}) and not is_nested({})
