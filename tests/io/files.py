"""Torch files of every kind, written by torch itself, with what they hold."""

from __future__ import annotations

import argparse
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptkit.core.spec import Tensor
from ckptkit.core.tree import Opaque, Tree, mapped
from ckptkit.io.torch_file import load_tree
from ckptkit.opened import read_tensor

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


class Settings(dict):  # type: ignore[type-arg]
    """A dict subclass that another machine does not have."""


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 5).to(torch.float32).reshape(shape).to(dtype)


def tensors(zipped: bool = True) -> dict[str, torch.Tensor]:
    """Every way in which a tensor may lie in its storage. torch itself cannot load the newest dtypes without a zip."""
    base = torch.randn(6, 10)
    out = {str(dtype): values(dtype, 3, 4) for dtype in (DTYPES if zipped else DTYPES[:-5])}
    return out | {
        "0-d": torch.tensor(3.25), "0-d int": torch.tensor(2**40 + 3), "empty": torch.empty(0, 7),
        "empty view": base[2:2], "transposed": base.t(), "rows": base[1:4], "column": base[:, 3:5],
        "every second": base[::2, ::3], "tied": base, "expanded": base[0].expand(4, 10),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1), "channels": torch.randn(2, 3, 4, 5).to(
            memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)), "frozen": torch.nn.Parameter(torch.randn(3), False),
        "strided 1": torch.randn(5)[::2], "buffer": torch.nn.Buffer(torch.randn(2)),
    }  # fmt: skip


def others() -> dict[str, Any]:
    """What people keep beside tensors, as plain as it comes back."""
    return {
        "nested": {"a": [1, 2.5, ("x", None, True)], 3: {"deep": [[], {}, ()]}},
        "ordered": OrderedDict(b=1, a=2), "bytes": b"\x00\xff", "set": {1, 2}, "complex": 1j,
        "numpy": np.arange(6, dtype=np.float32).reshape(2, 3), "numpy scalar": np.float64(2.5),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)), "size": torch.Size([1, 2]), "dtype": torch.bfloat16,
        "big": 2**100, "range": range(3), "dict subclass": Settings(depth=2), "default": defaultdict(list, a=[1]),
        "deque": deque([1, 2]),
    }  # fmt: skip


def unknown() -> dict[str, Any]:
    """Objects of classes that are not imported when read."""
    return {"args": argparse.Namespace(lr=0.1), "device": torch.device("cpu"), "type": argparse.Namespace}


def plain(tree: Tree) -> Any:
    """A tree with its tensors read."""
    return mapped(tree, lambda path, leaf: read_tensor(leaf) if isinstance(leaf, Tensor) else leaf)


def read(path: Path) -> Any:
    return plain(load_tree(path))


def same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        if not isinstance(a, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        left, right = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
        return not a.numel() or torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    if isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(b, dict):
        return isinstance(a, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Opaque):
        return False
    return bool(a == b)
