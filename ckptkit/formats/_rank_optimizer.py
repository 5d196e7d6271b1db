"""FSDP1's own optimizer state dicts, one a rank: vectors by integer id, cut back to the parameters that they belong to.

With use_orig_params an id is a parameter, and a rank has no state for one of which it holds nothing. Without, an id is
a whole flat parameter. What tells the ids apart are the lengths of their vectors on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.assemble import Hints
from ..core.box import Shape
from ..core.checkpoint import ModelFacts
from ..core.fqn import clean
from ..core.param_ids import match_ids, named_ids
from ..core.spec import Tensor
from ..core.tree import Tree
from ..errors import SourceError
from ._rank_flat import Unit, cut, signatures
from ._rank_merge import Merge
from ._rank_parts import sharded_leaves

_Slots = Mapping[str, Any]
_Lengths = dict[Any, dict[int, int]]  # id -> rank -> elements of its vectors, where the rank has state for it


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter that an id is, or is a part of: its shape and first element in the vector that all ranks' vectors
    make together, and where each rank's vector begins in that."""

    name: str
    shape: Shape
    start: int
    begins: Mapping[int, int]


def is_local(optimizers: Mapping[int, Tree]) -> bool:
    """Whether the optimizers of a sharded model hold vectors: no sharded tensors, and some tensor of one dimension."""
    states = [tree.get("state", {}) for tree in optimizers.values()]
    return not sharded_leaves(states) and any(
        _is_vector(value) for state in states for slots in state.values() for value in slots.values()
    )


def of_units(
    optimizers: Mapping[int, Tree], units: Sequence[Unit], facts: ModelFacts, hints: Hints, merge: Merge
) -> dict[str, Any]:
    """The optimizer by name, where the model was saved flat too. Raises SourceError, AmbiguousError."""
    groups, ids, lengths = _groups(optimizers, merge), _ids(optimizers), _lengths(optimizers)
    ranks = sorted(optimizers)
    targets: dict[Any, list[_Target]] = {}
    if all(unit.is_named for unit in units):
        holder = {name: unit for unit in units for name in unit.members}
        shapes = {key: tuple(held.get(rank, 0) for rank in ranks) for key, held in lengths.items()}
        for key, name in _named(ids, shapes, dict(signatures(units, ranks, facts)), hints).items():
            unit = holder[name]
            begins = {rank: unit.local(name, rank)[0] for rank in ranks}
            targets[key] = [_Target(name, unit.members[name], unit.starts[name], begins)]
    else:
        by_key = {unit.key: unit for unit in units if set(unit.members) - facts.frozen}
        # The first rank's vector has the full length of a shard; the last one's may be stored with or without padding.
        sizes = {key: (held[ranks[0]],) for key, held in lengths.items() if ranks[0] in held}
        full = {key: (unit.shards[ranks[0]][1].spec.numel,) for key, unit in by_key.items() if ranks[0] in unit.shards}
        for key, name in _of_flat(ids, sizes, full, by_key, hints).items():
            unit = by_key[name]
            begins = {rank: shard[0] for rank, shard in unit.shards.items()}
            targets[key] = [_Target(name, shape, unit.starts[name], begins) for name, shape in unit.members.items()]
    return _assembled(optimizers, groups, targets, merge)


def of_shapes(
    optimizers: Mapping[int, Tree], shapes: Mapping[str, Shape], hints: Hints, merge: Merge
) -> dict[str, Any]:
    """The optimizer by name, where the model was saved with names and shapes (verl's FSDP1 files).

    Each rank's vector goes on where the one before it ended. Raises SourceError where ids are whole flat parameters,
    AmbiguousError.
    """
    groups, ids, lengths = _groups(optimizers, merge), _ids(optimizers), _lengths(optimizers)
    totals = {key: (sum(held.values()),) for key, held in lengths.items()}
    sizes = {name: (math.prod(shape),) for name, shape in shapes.items()}
    if not set(totals.values()) <= set(sizes.values()):
        raise SourceError(
            "the optimizer's vectors are not those of single parameters",
            why="with use_orig_params=False they are flat parameters, and which parameters make one is in no file",
            hint="save the optimizer through FSDP.optim_state_dict, or --weights-only",
        )
    targets: dict[Any, list[_Target]] = {}
    for key, name in _named(ids, totals, sizes, hints).items():
        begins: dict[int, int] = {}
        at = 0
        for rank in sorted(optimizers):
            begins[rank] = at
            at += lengths.get(key, {}).get(rank, 0)
        targets[key] = [_Target(name, shapes[name], 0, begins)]
    return _assembled(optimizers, groups, targets, merge)


def _groups(optimizers: Mapping[int, Tree], merge: Merge) -> list[dict[str, Any]]:
    held = {rank: tree.get("param_groups", []) for rank, tree in optimizers.items()}
    merged: list[dict[str, Any]] = merge.tree(held, ("optimizer", "param_groups"))
    return merged


def _ids(optimizers: Mapping[int, Tree]) -> list[list[Any]]:
    return [list(group["params"]) for group in optimizers[min(optimizers)].get("param_groups", [])]


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and len(value.spec.shape) == 1


def _lengths(optimizers: Mapping[int, Tree]) -> _Lengths:
    out: _Lengths = {}
    for rank, tree in sorted(optimizers.items()):
        for key, slots in tree.get("state", {}).items():
            length = next((value.spec.numel for value in slots.values() if _is_vector(value)), None)
            if length is not None:
                out.setdefault(key, {})[rank] = length
    return out


def _named(
    ids: Sequence[Sequence[Any]], shapes: Mapping[Any, Shape], names: Mapping[str, Shape], hints: Hints
) -> dict[Any, str]:
    """Names of ids: as given, or the one assignment that fits the order and the lengths. Keys that are names stay."""
    flat = [key for group in ids for key in group]
    if any(isinstance(key, str) and not key.isdecimal() for key in flat):
        return {key: clean(str(key)) for key in flat}
    if hints.param_names is not None and len(hints.param_names) == len(flat):
        return named_ids(ids, [clean(name) for name in hints.param_names])
    return match_ids(ids, shapes, names)


def _of_flat(
    ids: Sequence[Sequence[Any]],
    sizes: Mapping[Any, Shape],
    full: Mapping[str, Shape],
    units: Mapping[str, Unit],
    hints: Hints,
) -> dict[Any, str]:
    """Which flat parameter an id is. Where the optimizer's parameters were named, their names say which units are in
    which group; in a group they stand in the order of the wrapped model."""
    home = {name: key for key, unit in units.items() for name in unit.members}
    told = [home[clean(name)] for name in hints.param_names or () if clean(name) in home]
    groups: list[list[str]] = []
    for group in ids:
        taken: list[str] = []
        while told and (told[0] in taken or len(taken) < len(group)):
            taken = list(dict.fromkeys([*taken, told.pop(0)]))
        groups.append(sorted(taken, key=list(full).index))
    named = [key for group in groups for key in group]
    if [len(group) for group in groups] == [len(group) for group in ids] and len(set(named)) == len(named) and named:
        found = dict(zip((key for group in ids for key in group), named, strict=True))
        if all(full[found[key]] == size for key, size in sizes.items() if key in found):
            return found
    return _named(ids, sizes, full, Hints())


def _assembled(
    optimizers: Mapping[int, Tree],
    groups: Sequence[Mapping[str, Any]],
    targets: Mapping[Any, Sequence[_Target]],
    merge: Merge,
) -> dict[str, Any]:
    states: dict[Any, dict[int, _Slots]] = {}
    for rank, tree in sorted(optimizers.items()):
        for key, slots in tree.get("state", {}).items():
            states.setdefault(key, {})[rank] = slots
    out: dict[str, dict[str, Any]] = {}
    for key in (key for key in targets if key in states):
        for target in targets[key]:
            out[target.name] = _state(states[key], target, merge)
    named = [
        {**group, "params": [target.name for key in group["params"] for target in targets.get(key, ())]}
        for group in groups
    ]
    return {"state": out, "param_groups": named}


def _state(held: Mapping[int, _Slots], target: _Target, merge: Merge) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for slot in dict.fromkeys(slot for slots in held.values() for slot in slots):
        values = {rank: slots[slot] for rank, slots in held.items() if slot in slots}
        vectors = {rank: value for rank, value in values.items() if _is_vector(value)}
        if len(vectors) < len(values):
            out[slot] = merge.tree(values, ("optimizer", "state", target.name, slot))
            continue
        dtype = next(iter(vectors.values())).spec.dtype
        parts = [(target.begins[rank], vector) for rank, vector in vectors.items() if rank in target.begins]
        out[slot] = cut(target.shape, dtype, target.start, parts)
    return out
