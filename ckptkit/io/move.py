"""Strided copies, casts and comparisons of raw buffers, by torch's kernels on views of the same memory."""

from __future__ import annotations

import torch

from ..core.box import Shape
from ..core.compare import BlockDiff

_INF = float("inf")
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name of `core.dtype`."""
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def as_tensor(buffer: memoryview | bytearray, dtype: str) -> torch.Tensor:
    """A 1-D tensor that shares the buffer's memory."""
    if not len(buffer):
        return torch.empty(0, dtype=torch_dtype(dtype))
    return torch.frombuffer(buffer, dtype=torch_dtype(dtype))


def move(
    source: memoryview,
    source_dtype: str,
    source_strides: Shape,
    target: memoryview,
    target_dtype: str,
    target_strides: Shape,
    target_offset: int,
    sizes: Shape,
) -> None:
    """`core.gather.Move` by torch: rounds to nearest even where the cast narrows, as `Tensor.to` does."""
    span = as_tensor(source, source_dtype).as_strided(sizes, source_strides)
    as_tensor(target, target_dtype).as_strided(sizes, target_strides, target_offset).copy_(span)


def differ(a: memoryview, b: memoryview, dtype: str, tolerance: tuple[float, float] | None) -> BlockDiff | None:
    """`core.compare.Differ` by torch.

    Without a tolerance bits decide: -0.0 is not 0.0, and a NaN equals the same NaN. With one, zeros are equal and so
    are NaNs; a NaN or an infinity is never near anything else, whatever the tolerance.
    """
    if a == b:
        return None
    left, right = as_tensor(a, dtype), as_tensor(b, dtype)
    width = left.element_size()
    if width in _BYTES:
        bits = left.view(_BYTES[width]) != right.view(_BYTES[width])
    else:
        pairs = left.view(torch.int64).view(-1, width // 8) != right.view(torch.int64).view(-1, width // 8)
        bits = pairs.any(dim=1)
    wide = torch.complex128 if left.is_complex() else torch.float64
    x, y = left.to(wide), right.to(wide)
    gap = _exact_gap(left, right, (x - y).abs())
    # Where the bits are the same there is no gap; elsewhere a NaN or an infinity is infinitely far away.
    gap = torch.where(bits, gap.nan_to_num(nan=_INF, posinf=_INF), torch.zeros_like(gap))
    size = torch.maximum(x.abs(), y.abs())
    outside = bits
    if tolerance is not None:
        rtol, atol = tolerance
        gap = torch.where(x.isnan() & y.isnan(), torch.zeros_like(gap), gap)
        outside = bits & (gap.isinf() | (gap > atol + rtol * size))
        if not bool(outside.any()):
            return None
    relative = torch.where(gap.isinf(), gap, torch.where(size > 0, gap / size, torch.zeros_like(gap)))
    return BlockDiff(float(gap.max()), float(relative.max()), int(outside.sum()), int(outside.to(torch.uint8).argmax()))


def _exact_gap(left: torch.Tensor, right: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Integers beyond 2**53 have no exact float64: their difference is taken before it is rounded."""
    if left.is_floating_point() or left.is_complex() or left.element_size() < 8:
        return rounded
    exact = (left.view(torch.int64) - right.view(torch.int64)).abs().double()
    # A difference that does not fit 64 bits wraps around; the rounded one is right to the last digits then.
    return torch.where(rounded < 2.0**62, exact, rounded)
