"""Changes to a checkpoint before it is written: names, which weights, dtypes, weights only. All pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..errors import UsageError
from .checkpoint import Checkpoint, Drop
from .dtype import is_float
from .spec import Tensor, TensorKey
from .tree import TensorRef, mapped


def renamed(checkpoint: Checkpoint, rename: Callable[[str], str]) -> Checkpoint:
    """The same checkpoint with every fully qualified name changed, in groups and aliases too.

    Raises UsageError where two names become one.
    """
    entries: dict[TensorKey, Tensor] = {}
    for key, tensor in checkpoint.entries.items():
        new = key if key.slot == "extra" else TensorKey(rename(key.fqn), key.slot)
        if new in entries:
            raise UsageError(f"renaming makes two tensors {new}", hint="make the pattern narrower")
        entries[new] = tensor
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in checkpoint.param_groups]
    return replace(
        checkpoint,
        entries=entries,
        param_groups=groups,
        optimizer_values={rename(name): slots for name, slots in checkpoint.optimizer_values.items()},
        aliases={rename(alias): rename(owner) for alias, owner in checkpoint.aliases.items()},
    )


def renaming(strip_prefix: str, rules: Sequence[str]) -> Callable[[str], str]:
    """A renaming from `--strip-prefix P` and `--rename REGEX=REPLACEMENT` (in order, `re.sub` rules)."""
    patterns = []
    for rule in rules:
        pattern, equals, replacement = rule.partition("=")
        try:
            patterns.append((re.compile(pattern), replacement))
        except re.error as error:
            raise UsageError(f"--rename {rule!r} has no valid regular expression", why=str(error)) from error
        if not equals:
            raise UsageError(f"--rename {rule!r} has no '='", hint="write REGEX=REPLACEMENT")

    def rename(name: str) -> str:
        name = name.removeprefix(strip_prefix)
        for pattern, replacement in patterns:
            name = pattern.sub(replacement, name)
        return name

    return rename


def weights_only(checkpoint: Checkpoint) -> Checkpoint:
    """The model's own tensors, in their best precision; optimizer, extras and the source's drops are left out."""
    entries = {key: tensor for key, tensor in checkpoint.entries.items() if key.slot in ("value", "master")}
    return replace(checkpoint, entries=entries, param_groups=(), optimizer_values={}, extras={}, drops=())


def with_weights(checkpoint: Checkpoint, which: Literal["master", "value"], *, keep_masters: bool) -> Checkpoint:
    """Choose between fp32 masters and the weights as the model holds them, for a target that has room for one.

    With `keep_masters` the target holds both, and nothing changes.
    """
    masters = {key.fqn: tensor for key, tensor in checkpoint.entries.items() if key.slot == "master"}
    if keep_masters or not masters:
        return checkpoint
    entries: dict[TensorKey, Tensor] = {}
    for key, tensor in checkpoint.entries.items():
        if key.slot == "master":
            continue
        if key.slot == "value" and which == "master" and key.fqn in masters:
            tensor = masters[key.fqn].with_role(tensor.spec.role)
        entries[key] = tensor
    drops = checkpoint.drops
    if which == "value" and checkpoint.has_optimizer:
        drops = (*drops, Drop(f"the fp32 masters of {len(masters)} parameters", "--weights value asks for the others"))
    return replace(checkpoint, entries=entries, drops=drops)


def with_dtype(checkpoint: Checkpoint, dtype: str, *, keep_masters: bool) -> Checkpoint:
    """Cast the floating-point parameters (not buffers, not optimizer state) to a dtype.

    With `keep_masters` the fp32 weights stay beside narrower ones as masters of the trained parameters.
    """
    entries: dict[TensorKey, Tensor] = {}
    for key, tensor in checkpoint.entries.items():
        weight = key.slot == "value" and tensor.spec.role in ("param", "frozen") and is_float(tensor.spec.dtype)
        entries[key] = tensor.cast(dtype) if weight else tensor
        master = TensorKey(key.fqn, "master")
        if weight and keep_masters and tensor.spec.role == "param" and dtype != "float32":
            entries[master] = checkpoint.entries.get(master, tensor.cast("float32"))
    if keep_masters and dtype == "float32":
        # An fp32 run has no separate masters: its weights are the masters of the source.
        for key in [key for key in entries if key.slot == "master"]:
            value = TensorKey(key.fqn)
            entries[value] = entries.pop(key).with_role(entries[value].spec.role)
    return replace(checkpoint, entries=entries)


def same_value(a: Any, b: Any) -> bool:
    """Whether two plain values of extras or groups are equal: lists and tuples alike, NaN equal to NaN."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return len(a) == len(b) and all(key in b and same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, bool) != isinstance(b, bool) or type(a).__name__ == "ndarray" or type(b).__name__ == "ndarray":
        return False
    return bool(a == b or (a != a and b != b))


def without_refs(tree: Any) -> Any:
    """A tree with its tensors replaced by their keys' text, so that trees of two checkpoints can be compared."""
    return mapped(tree, lambda path, value: f"<tensor {value.key.fqn}>" if isinstance(value, TensorRef) else value)
