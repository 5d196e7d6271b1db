"""Plans: coverage errors name the missing boxes, sources give every element once, casts say whether they round."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.box import Box, Shape, whole
from ckptkit.core.checkpoint import Drop
from ckptkit.core.layout import Fill, Late, Layout, OutFile, Raw
from ckptkit.core.plan import body_of, check_coverage, make_plan, sources
from ckptkit.core.spec import Piece, Tensor, TensorKey, TensorSpec
from ckptkit.errors import SourceError

from .layouts import Layout as Stored
from .layouts import laid_out, layouts, numbered, of, piece, shapes, world_sizes

KEY = TensorKey("layers.0.weight", "exp_avg")


@given(shapes, layouts, world_sizes, st.integers(0, 99))
def test_sources_give_every_element_once(shape: Shape, layout: Stored, ranks: int, seed: int) -> None:
    tensor = laid_out(numbered(shape), layout, ranks, seed)
    check_coverage([(KEY, tensor)])
    counts = torch.zeros(shape, dtype=torch.int64)
    for held, box in sources(tensor, whole(shape)):
        assert held.box.holds(box)
        counts[box.within(whole(shape))] += 1
    assert bool((counts == 1).all())


@given(shapes.filter(lambda shape: 0 not in shape and shape), world_sizes, st.integers(0, 99))
def test_a_missing_piece_is_named_with_its_place(shape: Shape, ranks: int, seed: int) -> None:
    values = numbered(shape)
    tensor = laid_out(values, Stored("", _dim0), ranks, seed)
    lost = random.Random(seed).randrange(len(tensor.pieces))
    left = tensor.pieces[:lost] + tensor.pieces[lost + 1 :]
    with pytest.raises(SourceError) as caught:
        check_coverage([(TensorKey("whole"), of(values, (piece(values, whole(shape)),))), (KEY, of(values, left))])
    (fault,) = caught.value.faults
    box = tensor.pieces[lost].box
    assert fault == f"{KEY}: {box.numel} of {values.numel()} elements are nowhere, the first at {box.offsets}"
    assert caught.value.why and caught.value.hint


def _dim0(tensor: torch.Tensor, ranks: int, rng: random.Random):  # type: ignore[no-untyped-def]
    from .layouts import _shards

    return _shards(0)(tensor, ranks, rng)


def test_every_tensor_that_is_not_covered_is_named() -> None:
    empty = Tensor(TensorSpec((2, 3), "float32"), ())
    with pytest.raises(SourceError) as caught:
        check_coverage([(TensorKey(name), empty) for name in ("a", "b", "c")])
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["a", "b", "c"]


@pytest.mark.parametrize("box", [Box((0,), (3,)), Box((1, 0), (2, 3)), Box((-1, 0), (2, 3))])
def test_a_piece_outside_of_its_tensor_is_refused(box: Box) -> None:
    values = numbered((2, 3))
    pieces = (piece(values, whole((2, 3))), Piece(box, piece(values, whole((2, 3))).place, "float32"))
    with pytest.raises(SourceError, match="outside of"):
        check_coverage([(KEY, of(values, pieces))])


def test_a_plan_sums_up_and_is_json() -> None:
    values = numbered((4, 3))
    tensor = of(values, (piece(values, whole((4, 3))),))
    narrow = tensor.cast("bfloat16")
    first = (Raw(b"head"), body_of(KEY, narrow, whole((4, 3))), Fill(6), Late(2, lambda checksums: b"ok"))
    half = Box((2, 0), (2, 3))
    files = (OutFile("a", first), OutFile("b", (body_of(TensorKey("w"), tensor, half),)))
    plan = make_plan(Layout(files), [Drop("args", "unknown")], ["twice", "twice"], chunk=1 << 20, workers=2)
    said = json.loads(json.dumps(plan.as_json()))
    assert said["files"] == [{"name": "a", "bytes": 4 + 24 + 6 + 2}, {"name": "b", "bytes": 24}]
    assert said["bytes"] == 60 and said["tensor_bytes"] == 48 and said["copies"] == 2 and said["tensors"] == 2
    assert said["casts"] == [{"tensor": str(KEY), "from": "float32", "to": "bfloat16", "lossless": False}]
    assert said["drops"] == [{"what": "args", "reason": "unknown"}] and said["warnings"] == ["twice"]
    assert [(copy.target, copy.box) for copy in plan.copies()] == [("a", whole((4, 3))), ("b", half)]
    assert plan.peak_bytes == 4 + 2 * 2 * 24


def test_a_plan_of_an_incomplete_tensor_is_refused() -> None:
    tensor = Tensor(TensorSpec((2,), "float32"), ())
    layout = Layout((OutFile("a", (body_of(KEY, tensor, whole((2,))),)),))
    with pytest.raises(SourceError, match="incomplete"):
        make_plan(layout, [], [], chunk=1024, workers=1)
