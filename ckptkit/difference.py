"""diff: where two checkpoints of any formats differ, in tensors, groups, extras, aliases; in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .core.checkpoint import Checkpoint
from .core.compare import ValueDiff, compare
from .core.dtype import ITEMSIZE
from .core.spec import Tensor, TensorKey
from .core.transform import same_value, without_refs
from .core.tree import TensorRef, walk
from .errors import UsageError
from .io.move import differ, move
from .opening import open as open_checkpoint

Kind = Literal["only in a", "only in b", "shape", "dtype", "value"]
Matter = Literal["tensor", "group", "extra", "alias", "optimizer value"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: what it is of, its name, how it differs, the two sides in words, and numbers for values."""

    matter: Matter
    name: str
    kind: Kind
    a: str = ""
    b: str = ""
    value: ValueDiff | None = None

    def __str__(self) -> str:
        text = f"{self.matter} {self.name}: {self.kind}"
        if self.value is not None:
            at = f"first at {self.value.first}, {self.value.count} elements"
            return f"{text} differs by {self.value.max_abs:.6g} (relative {self.value.max_rel:.3g}), {at}"
        return f"{text} {self.a} | {self.b}".rstrip(" |") if self.a or self.b else text

    def as_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"matter": self.matter, "name": self.name, "kind": self.kind, "a": self.a, "b": self.b}
        if self.value is not None:
            out |= {"max_abs": self.value.max_abs, "max_rel": self.value.max_rel, "count": self.value.count,
                    "first": list(self.value.first)}  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class DiffReport:
    """All differences of two checkpoints. `compared` counts tensors that both have, `tolerance` is (rtol, atol)."""

    a: Checkpoint
    b: Checkpoint
    differences: tuple[Difference, ...]
    compared: int
    tolerance: tuple[float, float] | None

    @property
    def equal(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        return {
            "a": {"path": self.a.path, "format": self.a.format, "dialect": self.a.dialect},
            "b": {"path": self.b.path, "format": self.b.format, "dialect": self.b.dialect},
            "equal": self.equal,
            "compared": self.compared,
            "tolerance": list(self.tolerance) if self.tolerance else None,
            "differences": [each.as_json() for each in self.differences],
        }


def diff(
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    tolerance: float | tuple[float, float] | None = None,
    *,
    slots: Sequence[str] = (),
    model: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DiffReport:
    """Compare two checkpoints of any formats, given as paths or opened.

    `tolerance` is rtol or (rtol, atol); without one, equal means equal in every bit. `slots` limits the comparison to
    some slots (`value`, `exp_avg`, ...) and leaves groups and extras out. Raises what `open` raises.
    """
    bounds = (float(tolerance), 0.0) if isinstance(tolerance, int | float) else tolerance
    if bounds is not None and min(bounds) < 0:
        raise UsageError(
            "a tolerance cannot be negative",
            why="it is the greatest difference that counts as none",
            hint="give 0 or more, or leave it out: then every bit counts",
        )
    left = a if isinstance(a, Checkpoint) else open_checkpoint(a, model=model)
    right = b if isinstance(b, Checkpoint) else open_checkpoint(b, model=model)
    pairs, found = _paired(left, right, slots)
    total, done = sum(tensor.spec.nbytes for _, tensor, _ in pairs), 0
    for key, x, y in pairs:
        found += list(tensor_difference(key, x, y, bounds))
        done += x.spec.nbytes
        progress(done, total)
    if not slots:
        found += [*group_differences(left, right), *extra_differences(left.extras, right.extras)]
        found += [*_alias_differences(left, right), *optimizer_value_differences(left, right)]
    return DiffReport(left, right, tuple(found), len(pairs), bounds)


def _paired(
    a: Checkpoint, b: Checkpoint, slots: Sequence[str]
) -> tuple[list[tuple[TensorKey, Tensor, Tensor]], list[Difference]]:
    pairs: list[tuple[TensorKey, Tensor, Tensor]] = []
    found: list[Difference] = []
    for key, tensor in a.entries.items():
        if slots and key.slot not in slots:
            continue
        other = b.entries.get(key) or b.entries.get(TensorKey(b.aliases.get(key.fqn, key.fqn), key.slot))
        if other is not None:
            pairs.append((key, tensor, other))
        else:
            found.append(Difference("tensor", str(key), "only in a", _said(tensor)))
    for key, tensor in b.entries.items():
        known = key in a.entries or TensorKey(a.aliases.get(key.fqn, key.fqn), key.slot) in a.entries
        if not known and (not slots or key.slot in slots):
            found.append(Difference("tensor", str(key), "only in b", "", _said(tensor)))
    return pairs, found


def _said(tensor: Tensor) -> str:
    return f"{tensor.spec.dtype}{list(tensor.spec.shape)}"


def tensor_difference(
    key: TensorKey, a: Tensor, b: Tensor, tolerance: tuple[float, float] | None
) -> Iterator[Difference]:
    """How two tensors of one key differ: shape, else dtype and values (as the first one's dtype).

    With a tolerance the dtype is no difference by itself: the values are compared as the wider of the two.
    """
    if a.spec.shape != b.spec.shape:
        yield Difference("tensor", str(key), "shape", str(list(a.spec.shape)), str(list(b.spec.shape)))
        return
    if a.spec.dtype != b.spec.dtype and tolerance is None:
        yield Difference("tensor", str(key), "dtype", a.spec.dtype, b.spec.dtype)
    if a is b:
        return
    wider = max(a.spec.dtype, b.spec.dtype, key=lambda dtype: ITEMSIZE[dtype])
    value = compare(a, b, move, differ, tolerance=tolerance, dtype=a.spec.dtype if tolerance is None else wider)
    if value is not None:
        yield Difference("tensor", str(key), "value", value=value)


def hyper_parameters(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Every parameter's hyper-parameters by name: what groups mean, whatever their number and order."""
    return {
        name: {key: without_refs(value) for key, value in group.items() if key != "params"}
        for group in checkpoint.param_groups
        for name in group["params"]
    }


def group_differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """Hyper-parameters that differ, each with the parameters that it differs for."""
    left, right = hyper_parameters(a), hyper_parameters(b)
    for kind, names in (("only in a", sorted(set(left) - set(right))), ("only in b", sorted(set(right) - set(left)))):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield Difference("group", names[0] + more, kind)  # type: ignore[arg-type]
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in left:
        mine, other = left[name], right.get(name)
        if other is None:
            continue
        for key in dict.fromkeys([*mine, *other]):
            if not same_value(mine.get(key), other.get(key)) or (key in mine) != (key in other):
                sides = (repr(mine[key]) if key in mine else "absent", repr(other[key]) if key in other else "absent")
                found.setdefault((key, *sides), []).append(name)
    for (key, x, y), names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Difference("group", f"{key} of {names[0]}{more}", "value", x, y)


def extra_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Extras that one side lacks, or whose leaves differ; tensors in them are compared as tensors elsewhere."""
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            yield Difference("extra", name, "only in a" if name in a else "only in b")
        elif not same_value(without_refs(a[name]), without_refs(b[name])):
            leaves = [(path, leaf) for path, leaf in walk(a[name]) if not isinstance(leaf, TensorRef)]
            other = dict(walk(b[name]))
            first = next((path for path, leaf in leaves if path not in other or not same_value(leaf, other[path])), ())
            where = ".".join(map(str, (name, *first)))
            mine = dict(leaves).get(first, "")
            yield Difference("extra", where, "value", _short(mine), _short(other.get(first, "absent")))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _alias_differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    for name in sorted(set(a.aliases) - set(b.aliases)):
        if TensorKey(name) not in b.entries:
            yield Difference("alias", name, "only in a", f"tied to {a.aliases[name]}")
    for name in sorted(set(b.aliases) - set(a.aliases)):
        if TensorKey(name) not in a.entries:
            yield Difference("alias", name, "only in b", "", f"tied to {b.aliases[name]}")


def optimizer_value_differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    for name in dict.fromkeys([*a.optimizer_values, *b.optimizer_values]):
        mine, other = a.optimizer_values.get(name, {}), b.optimizer_values.get(name, {})
        if not same_value(without_refs(mine), without_refs(other)):
            yield Difference("optimizer value", name, "value", _short(mine), _short(other))
