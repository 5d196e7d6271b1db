"""Laying out FSDP1's local state dicts, one file a rank: each unit's flat parameter, and the optimizer's own state.

Sources (torch 2.13): `_local_post_state_dict_hook` in fsdp/_state_dict_utils.py: a unit's shard is a ShardedTensor of
the flat parameter, stored without the padding at its end; with use_orig_params each name is listed beside it as this
rank's part, of no elements where it has none. The optimizer's vectors keep that padding, and with use_orig_params a
rank has no state for a parameter of which it holds nothing. Padding is written as zeros; torch has 42 between
parameters, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.box import boxes_of_run
from ..core.checkpoint import Contents, Drop, ModelFacts
from ..core.dtype import ITEMSIZE
from ..core.layout import Body, Fill, Layout, OutFile
from ..core.options import WriteOptions
from ..core.spec import Tensor, TensorKey
from ..core.tree import Tree
from ..errors import UsageError
from ..io.pickle_out import StorageSlice
from ._fsdp_units import FlatUnit, Wrapping, flat_units
from ._rank_joint import ids_of_units, joint_state
from ._rank_objects import chunk_sharded
from ._rank_write import own, rank_file

FSDP1_LOCAL = "fsdp1-local"


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """A storage of `size` elements: `runs` of tensors (key, tensor, first element, end, where they lie), else zeros."""

    dtype: str
    size: int
    runs: tuple[tuple[TensorKey, Tensor, int, int, int], ...]

    def segments(self, record: int) -> Iterator[Body | Fill]:
        at = 0
        for key, tensor, low, high, begin in self.runs:
            if begin > at:
                yield Fill((begin - at) * ITEMSIZE[self.dtype], record)
            for box in boxes_of_run(tensor.spec.shape, low, high):
                yield Body(key, tensor, box, self.dtype, record)
            at = begin + high - low
        if self.size > at:
            yield Fill((self.size - at) * ITEMSIZE[self.dtype], record)

    @property
    def slice(self) -> StorageSlice:
        return StorageSlice(self, self.dtype, self.size, (self.size,))


@dataclass(frozen=True, slots=True)
class _Source:
    """What is written: `values` by parameter, `rest` as every rank has it, the optimizer by name or None."""

    facts: ModelFacts
    units: list[FlatUnit]
    values: Mapping[str, Tensor]
    rest: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None


def layout(contents: Contents, options: WriteOptions) -> Layout:
    """The files of all ranks.

    Raises UsageError where the model is not given, or does not fit the checkpoint or the units; LossError where the
    parameters of a unit cannot share one optimizer state.
    """
    source = _source(contents, options)
    device = options.mesh.partition(":")[0]
    extras = {name: tree for name, tree in contents.tree.items() if name not in ("model", "optimizer")}
    write = _named if options.use_orig_params else _joint
    parts, implied = write(source, options.ranks, device)
    files: list[OutFile] = []
    for rank, part in enumerate(parts):
        tree: dict[str, Tree] = {**part, **{name: own(value, rank) for name, value in extras.items()}}
        files.append(rank_file(f"checkpoint_rank_{rank}.pt", tree))
    return Layout(tuple(files), implied=implied)


def drops(contents: Contents, options: WriteOptions) -> Iterator[Drop]:
    """Optimizer states that are neither of their parameter's shape nor 0-d: a flat parameter has no place for them."""
    reason = "FSDP1's optimizer works on vectors: it has no state of this shape"
    for name, slots in (contents.tree.get("optimizer") or {}).get("state", {}).items():
        parameter = contents.tree["model"].get(name)
        for slot, value in slots.items():
            if isinstance(value, Tensor) and not _fits(value, parameter):
                yield Drop(str(TensorKey(name, slot)), reason)


def _fits(value: Tensor, parameter: Any) -> bool:
    return not value.spec.shape or (isinstance(parameter, Tensor) and value.spec.shape == parameter.spec.shape)


def _source(contents: Contents, options: WriteOptions) -> _Source:
    facts = options.hints.model
    if facts is None:
        raise UsageError(
            "FSDP1's local state dicts cannot be written without the model",
            why="a flat parameter holds parameters in the order of the model's modules, which no checkpoint says",
            hint="--model pkg.mod:factory names a function that builds the model",
        )
    if options.optimizer_keys == "id":
        raise UsageError(
            "optimizer keys are not chosen for FSDP1's local state dicts",
            why="they are always the integers of `optimizer.state_dict()`",
            hint="leave --optimizer-keys out",
        )
    model: Mapping[str, Any] = contents.tree["model"]
    buffers = {*facts.buffers, *(contents.facts.get("buffers") or ())}
    values, rest, faults = {}, {}, []
    for name, value in model.items():
        if name in facts.parameters and isinstance(value, Tensor):
            values[name] = value
        elif name not in facts.aliases and isinstance(value, Tensor) and name not in buffers:
            faults.append(f"{name} is not in the model")
        elif name not in facts.aliases:
            rest[name] = value
    for name, shape in facts.parameters.items():
        if name not in values:
            faults.append(f"{name} is not in the checkpoint")
        elif values[name].spec.shape != shape:
            faults.append(f"{name} is {values[name].spec.shape} in the checkpoint and {shape} in the model")
    if faults:
        raise UsageError(
            "the checkpoint and the model do not fit",
            why="a flat parameter needs every parameter of its unit, and has no room for others",
            hint="--model must build the model as it is trained, unwrapped; --rename and --strip-prefix change names",
            faults=faults,
        )
    how = Wrapping(options.fsdp_units, options.use_orig_params, options.ranks, options.fsdp_param_dtype)
    units = flat_units(facts, {name: value.spec.dtype for name, value in values.items()}, how)
    dropped = {drop.what for drop in drops(contents, options)}
    return _Source(facts, units, values, rest, _without(contents.tree.get("optimizer"), dropped))


def _without(optimizer: Mapping[str, Any] | None, dropped: set[str]) -> Mapping[str, Any] | None:
    if optimizer is None:
        return None
    state = {
        name: {slot: value for slot, value in slots.items() if str(TensorKey(name, slot)) not in dropped}
        for name, slots in optimizer["state"].items()
    }
    return {**optimizer, "state": state}


_Parts = tuple[list[dict[str, Any]], tuple[Tensor, ...]]  # a tree for each rank; tensors that stand for more than one


def _shard(unit: FlatUnit, rank: int, size: int, tensors: Mapping[str, Tensor], slot: str, dtype: str) -> Vector:
    """The first `size` elements of a rank's shard."""
    runs = []
    for name in unit.members:
        low, high = unit.local(name, rank)
        if high > low and name in tensors:
            begin = unit.starts[name] + low - rank * unit.size
            runs.append((TensorKey(name, slot), tensors[name], low, high, begin))
    return Vector(dtype, size, tuple(runs))


def _alone(key: TensorKey, tensor: Tensor, low: int, high: int) -> Vector:
    return Vector(tensor.spec.dtype, high - low, ((key, tensor, low, high, 0),))


def _scalar(key: TensorKey, tensor: Tensor) -> StorageSlice:
    """A 0-d tensor in a storage of its own: optimizers count steps in place."""
    return StorageSlice(_alone(key, tensor, 0, 1), tensor.spec.dtype, 1, ())


def _named(source: _Source, ranks: int, device: str) -> _Parts:
    """With use_orig_params: parameters by name and flat, sharing their storage; ids of the optimizer are parameters."""
    home = {name: unit for unit in source.units for name in unit.members}
    parts = []
    for rank in range(ranks):
        shards = {u.key: _shard(u, rank, u.size, source.values, "value", u.dtype).slice for u in source.units}
        model: dict[str, Any] = {}
        for name in source.facts.parameters:
            unit = home[name]
            low, high = unit.local(name, rank)
            begin = unit.starts[name] + low - rank * unit.size if high > low else 0
            storage = shards[unit.key].storage
            model[name] = StorageSlice(storage, unit.dtype, unit.size, (high - low,), begin)
        model |= {alias: model[name] for alias, name in source.facts.aliases.items()}
        model |= source.rest
        for unit in source.units:
            model[unit.key] = chunk_sharded(shards[unit.key], (unit.numel,), rank, ranks, device)
        parts.append({"model": model})
        if source.optimizer is not None:
            parts[-1]["optimizer"] = _numbered(source.optimizer, home, rank)
    return parts, ()


def _numbered(optimizer: Mapping[str, Any], home: Mapping[str, FlatUnit], rank: int) -> dict[str, Any]:
    groups = optimizer["param_groups"]
    ids = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    state = {}
    for name, index in ids.items():
        low, high = home[name].local(name, rank)
        if high > low and name in optimizer["state"]:
            slots = optimizer["state"][name].items()
            state[index] = {slot: _local(TensorKey(name, slot), value, low, high) for slot, value in slots}
    return {
        "state": state,
        "param_groups": [{**group, "params": [ids[name] for name in group["params"]]} for group in groups],
    }


def _local(key: TensorKey, value: Any, low: int, high: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _alone(key, value, low, high).slice if value.spec.shape else _scalar(key, value)


def _joint(source: _Source, ranks: int, device: str) -> _Parts:
    """Without use_orig_params: flat parameters alone, and each of them one id of the optimizer."""
    implied: list[Tensor] = []
    ids: dict[str, int] = {}
    groups: list[dict[str, Any]] = []
    states: dict[str, dict[str, Any]] = {}
    if source.optimizer is not None:
        ids, groups = ids_of_units(source.units, source.optimizer["param_groups"])
        states, implied = joint_state(source.units, source.optimizer["state"])
    parts = []
    for rank in range(ranks):
        model: dict[str, Any] = {}
        for unit in source.units:
            shard = _shard(unit, rank, unit.stored(rank), source.values, "value", unit.dtype).slice
            model[unit.key] = chunk_sharded(shard, (unit.numel,), rank, ranks, device)
        parts.append({"model": {**model, **source.rest}})
        if source.optimizer is not None:
            state: dict[int, dict[str, Any]] = {}
            for unit in (unit for unit in source.units if unit.path in ids and unit.path in states):
                slots = states[unit.path]
                state[ids[unit.path]] = {slot: _of_unit(unit, rank, slot, value) for slot, value in slots.items()}
            parts[-1]["optimizer"] = {"state": state, "param_groups": groups}
    return parts, tuple(implied)


def _of_unit(unit: FlatUnit, rank: int, slot: str, value: Any) -> Any:
    """What a unit has of one slot: tensors by member are one vector, padded; anything else is for all of them."""
    if isinstance(value, Tensor):
        return _scalar(TensorKey(next(iter(unit.members)), slot), value)
    if not isinstance(value, dict):
        return value
    dtype = next(iter(value.values())).spec.dtype
    return _shard(unit, rank, unit.size, value, slot, dtype).slice
