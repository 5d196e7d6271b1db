"""Trees as JSON values: tuples, bytes, arrays and odd keys are marked; tensors go where they are named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..core.checkpoint import Drop
from ..core.spec import Tensor
from ..core.tree import dotted, walk
from ..errors import SourceError
from ..io.move import dtype_name, torch_dtype

_MARK = "ckptkit"
_UNSAID: Any = object()


def unsaid(name: str, tree: Any) -> Iterator[Drop]:
    """The leaves of a tree that JSON cannot say."""
    for path, value in walk(tree):
        strange = [part for part in path if not _is_key(part)]
        if not strange and not isinstance(value, Tensor) and _leaf(value) is _UNSAID:
            strange = [value]
        if strange:
            yield Drop(dotted((name, *path)), f"JSON cannot hold a {type(strange[0]).__name__}")


def _is_key(key: Any) -> bool:
    """Whether a key of a dict can be said: what `_leaf` says, and tuples of it."""
    return all(map(_is_key, key)) if isinstance(key, tuple) else _leaf(key) is not _UNSAID


def said(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """The tree as JSON values. Its tensors are put into `tensors` under `name` and their paths; what cannot be said
    is left out of dicts and becomes null in lists (see `unsaid`)."""
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {_MARK: "tensor", "value": name}
    if isinstance(tree, Mapping):
        pairs = [(key, said(value, tensors, f"{name}.{key}")) for key, value in tree.items() if _is_key(key)]
        pairs = [(key, value) for key, value in pairs if value is not _UNSAID]
        if all(isinstance(key, str) for key, _ in pairs) and _MARK not in tree:
            return dict(pairs)
        return {_MARK: "dict", "value": [[said(key, {}, name), value] for key, value in pairs]}
    if isinstance(tree, list | tuple):
        items = [said(value, tensors, f"{name}.{index}") for index, value in enumerate(tree)]
        items = [None if item is _UNSAID else item for item in items]
        return {_MARK: "tuple", "value": items} if isinstance(tree, tuple) else items
    return _leaf(tree)


def _leaf(value: Any) -> Any:
    """Floats keep every bit: Python writes and reads their shortest exact text, and nan and inf by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | dict | tuple) and not value:
        return {_MARK: "tuple", "value": []} if isinstance(value, tuple) else value
    if isinstance(value, bytes):
        return {_MARK: "bytes", "value": value.hex()}
    if isinstance(value, torch.dtype):
        return {_MARK: "dtype", "value": dtype_name(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_MARK: "array", "value": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    return _UNSAID


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `said` was given. Raises SourceError for a tensor that is not there or an unknown mark."""
    if isinstance(value, list):
        return [decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decoded(item, tensors) for key, item in value.items()}
    kind = value[_MARK]
    inner: Any = value.get("value")
    if kind == "tensor" and inner in tensors:
        return tensors[inner]
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "dtype":
        return torch_dtype(inner)
    if kind == "array":
        return np.frombuffer(bytes.fromhex(inner[2]), np.dtype(inner[0])).reshape(inner[1]).copy()
    if kind == "tuple":
        return tuple(decoded(item, tensors) for item in inner)
    if kind == "dict":
        return {_hashable(decoded(key, tensors)): decoded(item, tensors) for key, item in inner}
    raise SourceError(
        f"the optimizer file names a {kind} {inner!r} that it does not hold",
        why="its metadata and its tensors are not of one save",
        hint="copy it again",
    )


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
