"""Optimizer ids to names: the one assignment that fits is found, and two are told from one, as by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.param_ids import match_ids, named_ids, shape_of_state
from ckptkit.errors import AmbiguousError, SourceError

SHAPES = [(2,), (3,), (2, 3)]


def brute(groups: list[list[int]], shapes: dict[int, tuple], names: dict[str, tuple]) -> Iterator[dict[int, str]]:
    """Every assignment that keeps the order within each group and gives each id a name of its shape."""
    order = list(names)

    def extend(index: int, taken: dict[int, str]) -> Iterator[dict[int, str]]:
        if index == len(groups):
            yield taken
            return
        free = [name for name in order if name not in taken.values()]
        for chosen in combinations(free, len(groups[index])):
            pairs = dict(zip(groups[index], chosen, strict=True))
            if all(shapes.get(key, names[name]) == names[name] for key, name in pairs.items()):
                yield from extend(index + 1, {**taken, **pairs})

    yield from extend(0, {})


@settings(max_examples=200)
@given(st.data())
def test_as_brute_force(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 6))
    names = {f"p{i}": data.draw(st.sampled_from(SHAPES)) for i in range(count)}
    used = data.draw(st.lists(st.sampled_from(sorted(names)), unique=True, max_size=6)) if names else []
    split = data.draw(st.integers(0, len(used)))
    parts = [sorted(part, key=list(names).index) for part in (used[:split], used[split:])]
    groups, true, ids = [], {}, iter(range(len(used)))
    for part in parts:
        groups.append([next(ids) for _ in part])
        true |= dict(zip(groups[-1], part, strict=True))
    known = {key: names[name] for key, name in true.items() if data.draw(st.booleans())}
    every = [dict(sorted(each.items())) for each in brute(groups, known, names)]
    distinct = [dict(items) for items in {tuple(each.items()) for each in every}]
    if len(distinct) == 1:
        assert match_ids(groups, known, names) == true
    else:
        with pytest.raises(AmbiguousError) as caught:
            match_ids(groups, known, names)
        assert "--param-names" in caught.value.hint and caught.value.why


def test_no_assignment_is_an_error() -> None:
    with pytest.raises(SourceError, match="do not fit"):
        match_ids([[0, 1]], {0: (2,), 1: (3,)}, {"a": (3,), "b": (2,)})
    with pytest.raises(SourceError, match="2 parameters and the model only 1"):
        match_ids([[0, 1]], {}, {"a": (3,)})


def test_two_groups_interleaved_in_the_model_are_found_by_shape() -> None:
    names = {f"{i}.{kind}": (4, 4) if kind == "weight" else (4,) for i in range(60) for kind in ("weight", "bias")}
    weights = [name for name in names if name.endswith("weight")]
    biases = [name for name in names if name.endswith("bias")]
    ids = [list(range(60)), list(range(60, 120))]
    shapes = {key: (4, 4) if key < 60 else (4,) for key in range(120)}
    assert match_ids(ids, shapes, names) == dict(enumerate([*weights, *biases]))


def test_a_long_search_ends_with_an_error_that_asks() -> None:
    names = {f"p{i}": (2,) for i in range(400)}
    with pytest.raises(AmbiguousError):
        match_ids([list(range(100)), list(range(100, 200))], {}, names)


def test_given_names_are_taken_by_position() -> None:
    assert named_ids([[0, 2], [1]], ["a", "b", "c"]) == {0: "a", 2: "b", 1: "c"}
    with pytest.raises(SourceError, match="2 parameter names were given for 3"):
        named_ids([[0, 2], [1]], ["a", "b"])


@pytest.mark.parametrize(
    ("slots", "shape"),
    [
        ({"step": (1,), "exp_avg": (3, 2)}, (3, 2)),
        ({"step": (), "row_var": (7, 1), "col_var": (1, 5)}, (7, 5)),
        ({"row_var": (5, 3, 4, 1), "col_var": (5, 3, 1, 2)}, (5, 3, 4, 2)),
        ({"step": (), "variance": (7,)}, (7,)),
        ({"exp_avg_sq_row": (5, 7), "exp_avg_sq_col": (5, 3)}, (5, 7, 3)),
        ({"d": (155,), "prev_flat_grad": (155,)}, None),
        ({"step": ()}, None),
    ],
)
def test_shape_of_state(slots: dict[str, tuple[int, ...]], shape: tuple[int, ...] | None) -> None:
    assert shape_of_state(slots) == shape
