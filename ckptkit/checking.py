"""The check after a conversion: what was written is opened again and compared with what was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from .core.checkpoint import Checkpoint, Drop
from .core.plan import Plan
from .core.spec import TensorKey
from .core.transform import same_value
from .core.tree import Tree, is_by_rank
from .difference import (
    Difference,
    extra_differences,
    hyper_parameters,
    optimizer_value_differences,
    tensor_difference,
)


def unplanned(planned: Checkpoint, plan_bodies: set[int], drops: list[Drop]) -> list[Drop]:
    """Tensors that neither stand in the layout nor are named in a drop: a target must not lose them silently."""
    return [
        Drop(str(key), "the target has no place for it")
        for key, tensor in planned.entries.items()
        if tensor.spec.numel and id(tensor) not in plan_bodies and not _dropped(key, drops)
    ]


def _dropped(key: TensorKey, drops: list[Drop]) -> bool:
    names = {drop.what for drop in drops}
    if key.slot == "extra":
        return any(key.fqn == name or key.fqn.startswith(f"{name}.") for name in names)
    role = "model" if key.slot == "value" else "master" if key.slot == "master" else "optimizer"
    # `w[GG.0]` lies in the state `w[GG]`.
    around = TensorKey(key.fqn, key.slot.partition(".")[0])
    return role in names or str(key) in names or str(around) in names or f"{role}.{key.fqn}" in names


def check_written(
    planned: Checkpoint,
    plan: Plan,
    written: Checkpoint,
    *,
    values: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Difference]:
    """Where the target does not hold what the plan put into it. `values` compares every element, else shapes only."""
    held = plan.layout.held
    drops = list(plan.drops)
    found: list[Difference] = []
    entries = [(key, tensor) for key, tensor in planned.entries.items() if id(tensor) in held or not tensor.spec.numel]
    total, done = sum(tensor.spec.nbytes for _, tensor in entries), 0
    for key, tensor in entries:
        other = written.entries.get(TensorKey(written.aliases.get(key.fqn, key.fqn), key.slot))
        if other is None:
            if not _dropped(key, drops):
                found.append(Difference("tensor", str(key), "only in a"))
        elif values:
            found += tensor_difference(key, tensor, other, None)
        elif (tensor.spec.shape, tensor.spec.dtype) != (other.spec.shape, other.spec.dtype):
            found.append(Difference("tensor", str(key), "shape", str(tensor.spec), str(other.spec)))
        done += tensor.spec.nbytes
        progress(done, total)
    names = {drop.what.partition(".")[0] for drop in drops}
    if "optimizer" not in names:
        found += _groups(planned, written)
        found += optimizer_value_differences(_states_said(planned, drops), _states_said(written, drops))
    held_names = {key.fqn for key in written.entries} | set(written.aliases)
    found += [Difference("alias", alias, "only in a") for alias in planned.aliases if alias not in held_names]
    found += [
        each
        for each in extra_differences(planned.extras, of_first_ranks(planned.extras, written.extras))
        if each.kind != "only in b" and each.name.partition(".")[0] not in names
    ]
    return found


def _states_said(checkpoint: Checkpoint, drops: list[Drop]) -> Checkpoint:
    """Without the states that were dropped, and without `None` (SGD's momentum where it has none)."""
    kept = {
        name: {
            slot: value
            for slot, value in slots.items()
            if value is not None and not _dropped(TensorKey(name, slot), drops)
        }
        for name, slots in checkpoint.optimizer_values.items()
    }
    return replace(checkpoint, optimizer_values=kept)


def of_first_ranks(planned: Tree, written: Tree) -> Tree:
    """What was written, without what ranks that the source did not have got for their own: copies, in their turn."""
    if is_by_rank(planned) and is_by_rank(written) and len(written) > len(planned):
        return {key: of_first_ranks(planned[key], written[key]) for key in planned}
    if isinstance(planned, Mapping) and isinstance(written, Mapping):
        return {key: of_first_ranks(planned.get(key), value) for key, value in written.items()}
    return written


def _groups(planned: Checkpoint, written: Checkpoint) -> Iterator[Difference]:
    """Hyper-parameters, parameter by parameter: a target may merge groups that are equal."""
    mine, other = hyper_parameters(planned), hyper_parameters(written)
    for name, values in mine.items():
        there = other.get(name, {})
        for key, value in values.items():
            if key not in there or not same_value(value, there[key]):
                yield Difference("group", f"{key} of {name}", "value", repr(value), repr(there.get(key, "absent")))
