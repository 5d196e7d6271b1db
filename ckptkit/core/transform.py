"""Changes to a checkpoint before it is written: names, which weights, dtypes, weights only. All pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from ..errors import UsageError
from .checkpoint import Checkpoint, Drop
from .dtype import is_float
from .spec import Tensor, TensorKey
from .tree import TensorRef, mapped

_C = TypeVar("_C", bound=Checkpoint)


def renamed(checkpoint: _C, rename: Callable[[str], str]) -> _C:
    """The same checkpoint with every fully qualified name changed, in groups and aliases too.

    Raises UsageError where two names become one, or one becomes empty.
    """
    entries: dict[TensorKey, Tensor] = {}
    _check_names(checkpoint, rename)
    for key, tensor in checkpoint.entries.items():
        entries[key if key.slot == "extra" else TensorKey(rename(key.fqn), key.slot)] = tensor
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in checkpoint.param_groups]
    return replace(
        checkpoint,
        entries=entries,
        param_groups=groups,
        optimizer_values={
            rename(name): mapped(slots, lambda path, value: _renamed_ref(value, rename))
            for name, slots in checkpoint.optimizer_values.items()
        },
        aliases={rename(alias): rename(owner) for alias, owner in checkpoint.aliases.items()},
    )


def _renamed_ref(value: Any, rename: Callable[[str], str]) -> Any:
    return TensorRef(TensorKey(rename(value.key.fqn), value.key.slot)) if isinstance(value, TensorRef) else value


def _check_names(checkpoint: Checkpoint, rename: Callable[[str], str]) -> None:
    old = dict.fromkeys([*(key.fqn for key in checkpoint.entries if key.slot != "extra"), *checkpoint.aliases])
    before: dict[str, str] = {}
    faults = []
    for name in old:
        new = rename(name)
        if not new:
            faults.append(f"{name} would have no name")
        elif before.setdefault(new, name) != name:
            faults.append(f"{before[new]} and {name} would both be {new}")
    if faults:
        raise UsageError(
            "the names would no longer tell the tensors apart",
            why="--rename and --strip-prefix apply to every name of the model",
            hint="make the pattern narrower, for example with ^ at its beginning",
            faults=faults[:20],
        )


def renaming(strip_prefix: str, rules: Sequence[str]) -> Callable[[str], str]:
    """A renaming from `--strip-prefix P` and `--rename REGEX=REPLACEMENT` (in order, `re.sub` rules)."""
    patterns = []
    for rule in rules:
        pattern, equals, replacement = rule.partition("=")
        if not equals:
            raise UsageError(
                f"--rename {rule!r} has no '='",
                why="it is a regular expression and what its matches become",
                hint="write REGEX=REPLACEMENT",
            )
        try:
            compiled = re.compile(pattern)
            compiled.sub(replacement, "")  # reads the replacement too, whether or not it is used
        except (re.error, IndexError) as error:
            raise UsageError(
                f"--rename {rule!r} is no valid regular expression and replacement",
                why=str(error),
                hint="Python's re.sub rules: \\1 is the first group",
            ) from error
        patterns.append((compiled, replacement))

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
        for key in [key for key in entries if key.slot == "master" and TensorKey(key.fqn) in entries]:
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
