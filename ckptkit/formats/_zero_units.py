"""The ranks' vectors of one group or sub-group, with the rule that cut them, checked against the parameters' shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.box import Shape
from ..core.spec import Tensor
from ..errors import SourceError
from ._zero_files import OptimFile, groups_of, shape_of, states_of
from ._zero_flat import joined
from ._zero_rule import FlatRule, PartitionRule


@dataclass(frozen=True, slots=True)
class Unit:
    """What is cut together: `shapes` in the order of the rule, `vectors` and `states` by rank, the `group` it is of."""

    group: int
    shapes: Mapping[str, Shape]
    rule: FlatRule | PartitionRule
    vectors: Sequence[Tensor]
    states: Sequence[Mapping[str, Any]]

    @property
    def dealt(self) -> bool:
        """Whether `round_robin_gradients` may have changed the order of the names."""
        return isinstance(self.rule, FlatRule)

    def weights(self) -> dict[str, Tensor]:
        """The weights that the optimizer works on, by parameter."""
        return joined(self.shapes, self.rule, self.vectors, self.vectors[0].spec.dtype)

    def state(self) -> dict[str, dict[str, Any]]:
        """The optimizer state by parameter and slot. What is not cut with the vector belongs to every parameter."""
        out: dict[str, dict[str, Any]] = {name: {} for name in self.shapes}
        for slot in dict.fromkeys(key for state in self.states for key in state):
            values = [state.get(slot) for state in self.states]
            cut = [value if self._is_cut(rank, slot, value) else None for rank, value in enumerate(values)]
            if any(value is not None for value in cut):
                dtype = next(value.spec.dtype for value in cut if value is not None)
                for name, tensor in joined(self.shapes, self.rule, cut, dtype).items():
                    out[name][slot] = tensor
            else:
                value = next((value for value in values if value is not None), None)
                for slots in out.values():
                    slots[slot] = value
        return out

    def _is_cut(self, rank: int, slot: str, value: Any) -> bool:
        return isinstance(value, Tensor) and slot != "step" and _fits(self.rule, rank, value)


def _fits(rule: FlatRule | PartitionRule, rank: int, vector: Tensor) -> bool:
    """Whether a vector has the length of a rank's partition, with or without the padding at its end."""
    lean = rule.lean(rank) if isinstance(rule, FlatRule) else rule.size
    return len(vector.spec.shape) == 1 and vector.spec.numel in (rule.size, lean)


def flat_units(shapes: Sequence[Any], files: Sequence[OptimFile]) -> list[Unit]:
    """The groups of ZeRO 1 and 2 (`param_shapes` of the model file, optimizer files by rank)."""
    units, faults = [], []
    _same_number("single_partition_of_fp32_groups", len(shapes), files)
    for index, named in enumerate(shapes):
        sizes = {name: shape_of(shape) for name, shape in named.items()}
        numels = [math.prod(shape) for shape in sizes.values()]
        vectors = [file.tree["single_partition_of_fp32_groups"][index] for file in files]
        rule = _flat_rule(numels, vectors, index, files)
        faults += [
            f"{file.name}: group {index} holds {vector.spec.numel} elements, not {rule.size} or {rule.lean(rank)}"
            for rank, (file, vector) in enumerate(zip(files, vectors, strict=True))
            if not _fits(rule, rank, vector)
        ]
        states = [states_of(file).get(_key(file, index), {}) for file in files]
        units.append(Unit(index, sizes, rule, vectors, states))
    _raise(faults)
    return units


def partition_units(shapes: Sequence[Any], files: Sequence[OptimFile]) -> list[Unit]:
    """The sub-groups of ZeRO 3; which group a sub-group is of is in the optimizer's own numbering."""
    units, faults = [], []
    _same_number("fp32_flat_groups", len(shapes), files)
    groups = groups_of(files[0]) or []
    owner = {int(key): number for number, group in enumerate(groups) for key in group["params"]}
    for index, named in enumerate(shapes):
        sizes = {name: shape_of(shape) for name, shape in named.items()}
        rule = PartitionRule.of([math.prod(shape) for shape in sizes.values()], len(files))
        vectors = [file.tree["fp32_flat_groups"][index] for file in files]
        faults += [
            f"{file.name}: sub-group {index} holds {vector.spec.numel} elements, not {rule.size}"
            for rank, (file, vector) in enumerate(zip(files, vectors, strict=True))
            if not _fits(rule, rank, vector)
        ]
        if index not in owner:
            faults.append(f"{files[0].name}: sub-group {index} belongs to no parameter group")
        states = [states_of(file).get(index, {}) for file in files]
        units.append(Unit(owner.get(index, 0), sizes, rule, vectors, states))
    _raise(faults)
    return units


def _key(file: OptimFile, index: int) -> int:
    """The number under which the optimizer keeps the state of a flat group."""
    groups = groups_of(file)
    return int(groups[index]["params"][0]) if groups and index < len(groups) else index


def _flat_rule(numels: Sequence[int], vectors: Sequence[Tensor], index: int, files: Sequence[OptimFile]) -> FlatRule:
    """DeepSpeed's own rule, or one with the partition size that all ranks agree on (other alignments)."""
    paddings = files[0].tree.get("param_alignment_paddings")
    inner = tuple(map(int, paddings[index])) if paddings else None
    rule = FlatRule.of(numels, len(files), inner)
    if all(_fits(rule, rank, vector) for rank, vector in enumerate(vectors)):
        return rule
    ends = {
        vector.spec.numel + int(file.tree.get("group_paddings", [0] * (index + 1))[index])
        for file, vector in zip(files, vectors, strict=True)
    }
    size = ends.pop() if len(ends) == 1 else 0
    return FlatRule(rule.numels, rule.paddings, rule.ranks, size) if size * rule.ranks >= rule.total else rule


def _same_number(key: str, count: int, files: Sequence[OptimFile]) -> None:
    _raise(
        [
            f"{file.name}: {len(file.tree.get(key) or ())} groups in {key}, the model file has {count}"
            for file in files
            if len(file.tree.get(key) or ()) != count
        ]
    )


def _raise(faults: list[str]) -> None:
    if faults:
        raise SourceError(
            "the optimizer files do not fit the shapes in the model file",
            why="they are of another model, another save, or another number of ranks",
            hint="restore the files of one save",
            faults=faults,
        )
