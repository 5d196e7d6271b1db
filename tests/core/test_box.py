"""Boxes: runs, intersections, differences, shards and blocks against arrays that count every element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.box import Box, Shape, blocks, boxes_of_run, indexes, minus, shard, uncovered, whole

from .layouts import full_shapes, numbered, shapes


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True)))


def elements(shape: Shape, box: Box) -> list[int]:
    """The flat positions that a box holds, in its own row-major order."""
    return numbered(shape, torch.int64)[box.within(whole(shape))].reshape(-1).tolist()


@given(st.data(), full_shapes)
def test_a_run_is_at_most_2n_minus_1_boxes_in_order(data: st.DataObject, shape: Shape) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = list(boxes_of_run(shape, start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert [position for box in boxes for position in elements(shape, box)] == list(range(start, stop))


@given(shapes)
def test_an_empty_run_is_no_box(shape: Shape) -> None:
    assert list(boxes_of_run(shape, 0, 0)) == []


@given(st.data(), shapes)
def test_intersection_and_difference_are_those_of_the_elements(data: st.DataObject, shape: Shape) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    mine, others = set(elements(shape, one)), set(elements(shape, other))
    shared = one & other
    assert (set(elements(shape, shared)) if shared else set()) == mine & others
    parts = list(minus(one, other))
    rest = [position for part in parts for position in elements(shape, part)]
    assert sorted(rest) == sorted(mine - others)  # each once
    assert len(parts) <= max(2 * len(shape), 1)
    if mine and others:
        assert one.holds(other) == (others <= mine)


@given(st.data(), shapes)
def test_uncovered_counts_what_no_box_holds(data: st.DataObject, shape: Shape) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    held = {position for box in boxes for position in elements(shape, box)}
    missing, hole = uncovered(shape, boxes)
    assert missing == math.prod(shape) - len(held)
    assert (hole is None) == (missing == 0)
    if hole is not None:
        assert hole.numel and not set(elements(shape, hole)) & held


@given(st.data(), shapes, st.integers(0, 40))
def test_blocks_respect_the_limit_and_keep_the_order(data: st.DataObject, shape: Shape, limit: int) -> None:
    box = data.draw(boxes_in(shape))
    parts = list(blocks(box, limit))
    assert all(0 < part.numel <= max(limit, 1) for part in parts)
    assert [p for part in parts for p in elements(shape, part)] == elements(shape, box)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("rows", range(12))
def test_a_shard_is_what_torch_chunk_gives(rows: int, count: int) -> None:
    tensor = numbered((rows, 3), torch.int64)
    expected = list(torch.chunk(tensor, count)) if rows else []
    for index in range(count):
        box = shard((rows, 3), 0, count, index)
        held = tensor[box.within(whole((rows, 3)))].tolist() if box else []
        assert held == (expected[index].tolist() if index < len(expected) else [])


def test_a_scalar_is_one_box() -> None:
    scalar = whole(())
    assert scalar.numel == 1 and scalar & scalar == scalar
    assert list(boxes_of_run((), 0, 1)) == [scalar] == list(blocks(scalar, 1))
    assert list(minus(scalar, scalar)) == [] and uncovered((), [scalar]) == (0, None) and uncovered((), [])[0] == 1
    assert list(indexes(())) == [()]
