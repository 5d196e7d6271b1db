"""Compare: one flipped bit is found, with its index, its size and its count; NaN, -0.0, infinities and tolerances."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.compare import compare
from ckptkit.core.spec import Tensor
from ckptkit.io.move import differ, move

from .layouts import Layout, Shape, full_shapes, laid_out, layouts, numbered, of, piece, shapes, whole, world_sizes


def plain(values: torch.Tensor) -> Tensor:
    return of(values, (piece(values, whole(tuple(values.shape))),))


@settings(max_examples=100)
@given(full_shapes, layouts, layouts, world_sizes, st.integers(1, 40), st.integers(0, 999))
def test_one_flipped_bit_is_found(shape: Shape, left: Layout, right: Layout, ranks: int, chunk: int, seed: int) -> None:
    values = numbered(shape) + 1
    at, bit = random.Random(seed).randrange(values.numel()), random.Random(seed).randrange(32)
    other = values.clone()
    other.view(-1).view(torch.int32)[at] ^= 1 << bit if bit < 31 else -(2**31)
    a, b = laid_out(values, left, ranks, seed), laid_out(other, right, ranks + 1, seed)
    assert compare(a, a, move, differ, chunk=chunk) is None
    found = compare(a, b, move, differ, chunk=chunk)
    assert found is not None and found.count == 1
    assert found.first == tuple(int(i) for i in (values != other).nonzero()[0])
    gap = abs(float(values.view(-1)[at]) - float(other.view(-1)[at]))
    assert found.max_abs == (gap if math.isfinite(gap) else math.inf)


@given(shapes, layouts, layouts, world_sizes, st.integers(1, 40), st.integers(0, 99))
def test_equal_values_in_any_layouts_are_equal(
    shape: Shape, left: Layout, right: Layout, ranks: int, chunk: int, seed: int
) -> None:
    values = numbered(shape, torch.bfloat16)
    a, b = laid_out(values, left, ranks, seed), laid_out(values, right, ranks + 2, seed)
    assert compare(a, b, move, differ, chunk=chunk) is None


def test_the_first_index_and_the_greatest_gap() -> None:
    a = torch.zeros(5, 7)
    b = a.clone()
    b[1, 3], b[4, 6], b[2, 0] = 0.5, -2.0, 1.0
    for chunk in (4, 20, 1000):
        found = compare(plain(a), plain(b), move, differ, chunk=chunk)
        assert found is not None
        assert (found.first, found.count, found.max_abs, found.max_rel) == ((1, 3), 3, 2.0, 1.0)


@pytest.mark.parametrize("tolerance", [None, (1e-3, 0.0), (0.5, 1e9)])
@pytest.mark.parametrize("pair", [(math.nan, 1.0), (math.inf, 1.0), (math.inf, -math.inf), (1.0, math.nan)])
def test_nan_and_infinity_are_never_near_a_number(
    pair: tuple[float, float], tolerance: tuple[float, float] | None
) -> None:
    a, b = torch.tensor([0.0, pair[0]]), torch.tensor([0.0, pair[1]])
    found = compare(plain(a), plain(b), move, differ, tolerance=tolerance)
    assert found is not None and (found.first, found.max_abs, found.max_rel) == ((1,), math.inf, math.inf)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0])
def test_the_same_odd_value_is_equal(value: float) -> None:
    a = torch.tensor([value, 1.0])
    assert compare(plain(a), plain(a.clone()), move, differ) is None
    assert compare(plain(a), plain(a.clone()), move, differ, tolerance=(1e-5, 0)) is None


def test_minus_zero_is_not_zero_unless_a_tolerance_is_given() -> None:
    a, b = torch.tensor([0.0]), torch.tensor([-0.0])
    found = compare(plain(a), plain(b), move, differ)
    assert found is not None and (found.max_abs, found.count) == (0.0, 1)
    assert compare(plain(a), plain(b), move, differ, tolerance=(0.0, 0.0)) is None


def test_two_different_nans_are_two_values_unless_a_tolerance_is_given() -> None:
    a = torch.tensor([0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    assert compare(plain(a), plain(b), move, differ) is not None
    assert compare(plain(a), plain(b), move, differ, tolerance=(0.0, 0.0)) is None


def test_tolerance_is_relative_to_the_greater_or_absolute() -> None:
    a, b = torch.tensor([100.0, 1e-9]), torch.tensor([100.5, 0.0])
    assert compare(plain(a), plain(b), move, differ, tolerance=(1e-2, 0.0)).first == (1,)  # type: ignore[union-attr]
    assert compare(plain(a), plain(b), move, differ, tolerance=(1e-2, 1e-8)) is None
    assert compare(plain(a), plain(b), move, differ, tolerance=(1e-3, 1e-8)).first == (0,)  # type: ignore[union-attr]


@pytest.mark.parametrize("tolerance", [None, (0.0, 0.5)])
def test_integers_differ_by_what_they_differ_by(tolerance: tuple[float, float] | None) -> None:
    """2**53 and 2**53 + 1 are one float64: integers are not compared as floats."""
    for low, high in ((2**53, 2**53 + 1), (-(2**60) - 1, -(2**60)), (2**62, 2**62 + 1)):
        found = compare(plain(torch.tensor([low])), plain(torch.tensor([high])), move, differ, tolerance=tolerance)
        assert found is not None and found.max_abs == 1.0
    found = compare(plain(torch.tensor([-(2**63)])), plain(torch.tensor([2**63 - 1])), move, differ)
    assert found is not None and found.max_abs == 2.0**64


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
     torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64],
    ids=str,
)  # fmt: skip
def test_every_dtype_compares(dtype: torch.dtype) -> None:
    a = torch.tensor([0, 1, 0, 1], dtype=torch.float32).to(dtype)
    b = torch.tensor([0, 1, 1, 1], dtype=torch.float32).to(dtype)
    assert compare(plain(a), plain(a.clone()), move, differ) is None
    found = compare(plain(a), plain(b), move, differ)
    assert found is not None and (found.first, found.count, found.max_abs) == ((2,), 1, 1.0)
