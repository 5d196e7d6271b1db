"""Strided copies, casts and comparisons of raw buffers, by torch's kernels on views of the same memory."""

from __future__ import annotations

import torch

from ..core.box import Shape
from ..core.compare import BlockDiff

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
    """`core.compare.Differ` by torch. Without a tolerance bits decide: -0.0 is not 0.0, a NaN equals the same NaN."""
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
    gap = (x - y).abs()
    # Two equal infinities or NaNs have no gap; one NaN has an infinite one.
    gap = torch.where(bits, gap.nan_to_num(nan=float("inf"), posinf=float("inf")), torch.zeros_like(gap))
    size = torch.maximum(x.abs(), y.abs())
    outside = bits
    if tolerance is not None:
        rtol, atol = tolerance
        outside = bits & ~(gap <= atol + rtol * size)
        if not bool(outside.any()):
            return None
    relative = torch.where(size > 0, gap / size, torch.zeros_like(gap)).nan_to_num(nan=float("inf"))
    return BlockDiff(float(gap.max()), float(relative.max()), int(outside.sum()), int(outside.to(torch.uint8).argmax()))
