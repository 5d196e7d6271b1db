"""One optimizer state for all parameters of a unit, as FSDP1 without use_orig_params has it, out of a state for each.

A flat parameter is one parameter to its optimizer: in one group, with one step. A member that was never stepped gets
zeros for its moments, as the zeros of its gradient would have left them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.box import whole
from ..core.gather import gather
from ..core.spec import Tensor
from ..core.transform import same_value
from ..errors import LossError
from ..io.move import move
from ._fsdp_units import FlatUnit


def ids_of_units(
    units: Sequence[FlatUnit], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """An integer for each unit that is in a group, by path, and the groups with those for parameters.

    Units stand in a group in the order of the wrapped model's parameters, as a script that filters them gets them.
    Raises LossError where a group holds a part of a unit.
    """
    group_of = {name: index for index, group in enumerate(groups) for name in group["params"]}
    faults = []
    homes: dict[int, list[str]] = {index: [] for index in range(len(groups))}
    for unit in units:
        held: dict[int | None, str] = {}
        for name in unit.members:
            held.setdefault(group_of.get(name), name)
        if len(held) > 1:
            said = (f"{n} in {'no group' if g is None else f'group {g}'}" for g, n in held.items())
            faults.append(f"{unit.path or 'the model itself'}: {', '.join(said)}")
        for index in (index for index in held if index is not None):
            homes[index].append(unit.path)
    _refuse("the optimizer's groups cut through units of FSDP1", faults)
    ids = {path: number for number, path in enumerate(path for paths in homes.values() for path in paths)}
    return ids, [{**group, "params": [ids[path] for path in homes[i]]} for i, group in enumerate(groups)]


def joint_state(
    units: Iterable[FlatUnit], state: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, dict[str, Any]], list[Tensor]]:
    """Each unit's slots by path: tensors by member where they are cut with it, one value where all have the same.

    Units without any state are left out. With them come the tensors that one value stands for.
    Raises LossError where the members of a unit differ in what they must share.
    """
    out: dict[str, dict[str, Any]] = {}
    shared: list[Tensor] = []
    faults: list[str] = []
    for unit in units:
        held = {name: state[name] for name in unit.members if state.get(name)}
        for slot in dict.fromkeys(slot for slots in held.values() for slot in slots):
            values = {name: slots[slot] for name, slots in held.items() if slot in slots}
            faults += [f"{name} has no {slot}, others of its unit have" for name in held if name not in values]
            cut = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.spec.shape}
            first = next(iter(values))
            if len(cut) == len(values) and len({value.spec.dtype for value in cut.values()}) == 1:
                out.setdefault(unit.path, {})[slot] = cut
                continue
            differing = [name for name, value in values.items() if not _same(values[first], value)]
            faults += [f"{slot} of {first} and of {name} differ" for name in differing]
            out.setdefault(unit.path, {})[slot] = values[first]
            shared += [value for value in values.values() if isinstance(value, Tensor)]
    _refuse("parameters of one unit of FSDP1 have optimizer states that it cannot hold apart", faults)
    return out, shared


def _refuse(what: str, faults: list[str]) -> None:
    if faults:
        raise LossError(
            what,
            why="without use_orig_params a unit is one parameter to the optimizer: one group, one step",
            hint="--use-orig-params, if the run that loads it has it; or --weights-only",
            faults=faults,
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.spec == b.spec and not a.spec.shape and _bytes(a) == _bytes(b))
    return same_value(a, b)


def _bytes(tensor: Tensor) -> bytes:
    return b"".join(bytes(view) for _, view in gather(tensor, whole(tensor.spec.shape), tensor.spec.dtype, move))
