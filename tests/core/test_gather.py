"""Gather: any layout to any layout, whatever the world sizes, shapes, dtypes and block limits."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.box import Box, Shape, boxes_of_run, whole
from ckptkit.core.gather import Arena, gather
from ckptkit.core.spec import Tensor, TensorSpec
from ckptkit.errors import SourceError
from ckptkit.io.move import move

from .layouts import Layout, data_of, full_shapes, laid_out, layouts, name_of, numbered, of, piece, shapes, world_sizes

limits = st.one_of(st.integers(1, 9), st.just(10_000))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])


def read(tensor: Tensor, box: Box, dtype: str, limit: int | None = None, arena: Arena | None = None) -> bytes:
    return b"".join(bytes(view) for _, view in gather(tensor, box, dtype, move, limit=limit, arena=arena))


@settings(max_examples=150)
@given(shapes, layouts, layouts, world_sizes, world_sizes, dtypes, limits, st.integers(0, 99))
def test_any_layout_to_any_layout(
    shape: Shape,
    source: Layout,
    target: Layout,
    ranks: int,
    more_ranks: int,
    dtype: torch.dtype,
    limit: int,
    seed: int,
) -> None:
    """Every piece of the target holds, packed, the elements of its box."""
    values = numbered(shape, dtype)
    stored = laid_out(values, source, ranks, seed)
    for wanted in laid_out(values, target, more_ranks, seed).pieces:
        expected = data_of(values[wanted.box.within(whole(shape))])
        assert read(stored, wanted.box, name_of(dtype), limit) == expected


@settings(max_examples=40)
@given(full_shapes, layouts, world_sizes, limits, st.integers(0, 99))
def test_a_cast_is_torchs_cast(shape: Shape, layout: Layout, ranks: int, limit: int, seed: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for source, target in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64),
                           (torch.float32, torch.float16), (torch.float64, torch.float32)):  # fmt: skip
        stored = laid_out(values.to(source), layout, ranks, seed)
        assert read(stored, whole(shape), name_of(target), limit) == data_of(values.to(source).to(target))


@given(full_shapes, world_sizes, st.integers(0, 99))
def test_two_different_layouts_share_an_arena(shape: Shape, ranks: int, seed: int) -> None:
    arena = Arena()
    for dtype in (torch.float64, torch.int8, torch.float32):
        values = numbered(shape, dtype)
        stored = laid_out(values, Layout("", lambda t, n, rng: iter([piece(t, whole(t.shape))])), ranks, seed)
        assert read(stored, whole(shape), name_of(dtype), 7, arena) == data_of(values)


def test_memory_of_a_block_is_bounded() -> None:
    """A thin column out of wide rows, with a cast: the span that is read never passes the limit."""
    values = numbered((64, 50))
    stored = of(values, (piece(values, whole((64, 50))),))
    asked: list[int] = []

    class Watched(Arena):
        __slots__ = ()

        def take(self, name: str, size: int) -> memoryview:
            asked.append(size)
            return super().take(name, size)

    column = Box((0, 3), (64, 1))
    out = read(stored, column, "float64", 100, Watched())
    assert out == data_of(values[:, 3:4].double())
    assert max(asked) <= 100 * 8


@given(full_shapes.filter(bool), st.integers(0, 99))
def test_a_hole_is_an_error_that_names_it(shape: Shape, seed: int) -> None:
    values = numbered(shape)
    hole = random.Random(seed).randrange(values.numel())
    boxes = [*boxes_of_run(shape, 0, hole), *boxes_of_run(shape, hole + 1, values.numel())]
    stored = of(values, tuple(piece(values, box) for box in boxes))
    with pytest.raises(SourceError) as caught:
        read(stored, whole(shape), "float32")
    where = tuple(int(i) for i in (values == hole).nonzero()[0])
    assert f"1 elements, the first at {where}" in caught.value.what


def test_a_tensor_without_pieces_has_no_source() -> None:
    with pytest.raises(SourceError):
        read(Tensor(TensorSpec((2,), "float32"), ()), whole((2,)), "float32")
    assert read(Tensor(TensorSpec((0, 2), "float32"), ()), whole((0, 2)), "float32") == b""
