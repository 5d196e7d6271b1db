"""FSDP1's flat parameters: where each parameter lies in them, and the parameters cut out of all ranks' shards.

Source of the rule: `_init_flat_param_and_metadata` and `_get_unpadded_shard` in torch/distributed/fsdp/_flat_param.py
(2.13). A unit's parameters lie one after the other in the order of `named_parameters`; with use_orig_params (from torch
2.1.2) each begins at a multiple of 16 bytes. The whole is split into equal shards, the last one padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.box import Shape
from ..core.checkpoint import ModelFacts
from ..core.dtype import ITEMSIZE
from ..core.fqn import clean
from ..core.run import pieces_of_run
from ..core.spec import Piece, Tensor, TensorSpec
from ..core.tree import Tree
from ..errors import SourceError
from ..io.places import FileExtent
from ._rank_merge import Merge
from ._rank_parts import Sharded

_NAMES = ("_flat_param", "flat_param")  # the second is that of torch 1.13
ALIGNMENT = 16  # bytes
Part = tuple[int, Tensor]  # where a stored vector begins in the flat parameter, and the vector


@dataclass(frozen=True, slots=True)
class Unit:
    """A flat parameter: its `members` with their shapes and first elements, its length without padding at the end, its
    dtype, and each rank's shard (a rank may have none). `is_named`: the files list the members (use_orig_params)."""

    key: str
    members: Mapping[str, Shape]
    starts: Mapping[str, int]
    numel: int
    dtype: str
    shards: Mapping[int, Part]
    is_named: bool = False

    def local(self, name: str, rank: int) -> tuple[int, int]:
        """The elements `[low, high)` of the flat parameter that are of `name` and in a rank's shard."""
        if rank not in self.shards:
            return 0, 0
        start, (begin, stored) = self.starts[name], self.shards[rank]
        low, high = max(start, begin), min(start + math.prod(self.members[name]), begin + stored.spec.numel)
        return (low, high) if high > low else (0, 0)


def is_flat_key(key: object) -> bool:
    """Whether a key of a model's state dict names a flat parameter."""
    return isinstance(key, str) and key.rpartition(".")[2] in _NAMES


def is_flat(model: Mapping[Any, Any]) -> bool:
    """Whether a state dict holds flat parameters (FSDP1, LOCAL_STATE_DICT)."""
    return any(is_flat_key(key) and isinstance(value, Sharded) for key, value in model.items())


def cut(shape: Shape, dtype: str, start: int, parts: Iterable[Part], storage: object = None) -> Tensor:
    """The tensor of `shape` that begins at element `start` of a flat parameter, out of vectors with parts of it."""
    stop = start + math.prod(shape)
    pieces: list[Piece] = []
    for begin, stored in parts:
        low, high = max(start, begin), min(stop, begin + stored.spec.numel)
        if high > low:
            place = stored.pieces[0].place
            pieces += pieces_of_run(shape, low - start, high - start, place, stored.spec.dtype, low - begin)
    return Tensor(TensorSpec(shape, dtype), tuple(pieces), storage)


def units_of(models: Mapping[int, Mapping[str, Any]], facts: ModelFacts | None) -> list[Unit]:
    """The units of a model that every rank saved flat, in the order of the files.

    Raises SourceError where the model is needed and not given, or does not fit.
    """
    first = models[min(models)]
    keys = [key for key in first if is_flat_key(key)]
    if facts is None:
        raise SourceError(
            "the files hold flat parameters without the shapes of what is in them",
            why="FSDP1's LOCAL_STATE_DICT saves vectors: only the model knows which parameters they are made of",
            hint="--model pkg.mod:factory names a function that builds the model",
            faults=[f"{key}: {first[key].shape[0]} elements" for key in keys],
        )
    prefixes = {key: clean(key).rpartition(".")[0] for key in keys}
    members: dict[str, dict[str, Shape]] = {key: {} for key in keys}
    for name, shape in facts.parameters.items():
        holders = [key for key, prefix in prefixes.items() if not prefix or name.startswith(f"{prefix}.")]
        if holders and not _is_apart(first.get(name), shape):
            members[max(holders, key=lambda key: len(prefixes[key]))][name] = shape
    faults: list[str] = []
    units = [_unit(key, members[key], models, faults) for key in keys]
    if faults:
        raise SourceError(
            "the flat parameters do not fit the model",
            why="its parameters, in order, do not have the lengths that are in the files",
            hint="--model must build the model as it was trained, unwrapped",
            faults=faults,
        )
    return units


def _is_apart(value: Tree, shape: Shape) -> bool:
    """Whether a parameter is in the file as it is: FSDP was told to ignore it."""
    return isinstance(value, Tensor) and len(shape) > 1 and value.spec.shape == shape


def _unit(key: str, members: Mapping[str, Shape], models: Mapping[int, Mapping[str, Any]], faults: list[str]) -> Unit:
    held = {rank: model[key] for rank, model in models.items() if isinstance(model.get(key), Sharded)}
    first = held[min(held)]
    shards = {rank: (value.parts[0][0].offsets[0], value.parts[0][1]) for rank, value in held.items() if value.parts}
    ranks = max(len(models), 1)
    is_named = any(clean(name) in members for model in models.values() for name in model)
    fitting = []
    for alignment in _alignments(first.dtype) if is_named else (1,):
        starts, numel = starts_of(members, alignment)
        unit = Unit(key, members, starts, numel, first.dtype, shards, is_named)
        if first.shape[0] in (numel, -(-numel // ranks) * ranks) and _agrees(unit, models):
            fitting.append(unit)
    if not fitting:
        total = sum(map(math.prod, members.values()))
        faults.append(f"{key}: {first.shape[0]} elements; the model has {len(members)} parameters of {total} there")
        return Unit(key, {}, {}, 0, first.dtype, shards)
    return fitting[0]


def _alignments(dtype: str) -> list[int]:
    """Of use_orig_params, in elements: 16 bytes of the dtype that is computed in, which may be narrower than that of
    the parameters (MixedPrecision); none before torch 2.1."""
    return list(dict.fromkeys([max(1, ALIGNMENT // ITEMSIZE[dtype]), 8, 16, 1]))


def starts_of(members: Mapping[str, Shape], alignment: int) -> tuple[dict[str, int], int]:
    """The first element of each parameter in a flat parameter, at multiples of `alignment` elements, and its length."""
    starts: dict[str, int] = {}
    at = 0
    for name, shape in members.items():
        at = -(-at // alignment) * alignment
        starts[name] = at
        at += math.prod(shape)
    return starts, at


def _agrees(unit: Unit, models: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether the vectors that use_orig_params lists by name have the lengths of this layout on every rank, and, where
    they are views of the flat parameter, its places."""
    for rank, model in models.items():
        named = {clean(key): value for key, value in model.items() if isinstance(value, Tensor)}
        for name in unit.members:
            low, high = unit.local(name, rank)
            if name in named and named[name].spec.shape != (high - low,):
                return False
            if name in named and high > low:
                begin, stored = unit.shards[rank]
                at = _distance(stored, named[name])
                if at is not None and at != (low - begin) * ITEMSIZE[unit.dtype]:
                    return False
    return True


def _distance(whole: Tensor, view: Tensor) -> int | None:
    """How many bytes into a stored vector another one begins; None where that lies elsewhere."""
    a, b = whole.pieces[0].place, view.pieces[0].place
    if not isinstance(a, FileExtent) or not isinstance(b, FileExtent) or a.path != b.path:
        return None
    return b.offset - a.offset if 0 <= b.offset - a.offset < whole.spec.nbytes else None


def model_of(
    units: Iterable[Unit], models: Mapping[int, Mapping[str, Any]], facts: ModelFacts, merge: Merge
) -> dict[str, Tree]:
    """The model's state dict: every parameter whole, tied names beside their owners, buffers as they are."""
    out: dict[str, Tree] = {}
    for unit in units:
        for name, shape in unit.members.items():
            out[name] = cut(shape, unit.dtype, unit.starts[name], unit.shards.values(), (unit.key, name))
    out |= {alias: out[owner] for alias, owner in facts.aliases.items() if owner in out}
    rest = {
        rank: {clean(k): v for k, v in model.items() if not is_flat_key(k) and clean(k) not in out}
        for rank, model in models.items()
    }
    return {**out, **merge.tree(rest, ("model",))}


def signatures(units: Iterable[Unit], ranks: Iterable[int], facts: ModelFacts) -> Iterator[tuple[str, Shape]]:
    """The local lengths on every rank of each parameter that is trained, in the model's order: what tells which one an
    optimizer's id is."""
    holder = {name: unit for unit in units for name in unit.members}
    for name in facts.parameters:
        if name in holder and name not in facts.frozen:
            spans = (holder[name].local(name, rank) for rank in ranks)
            yield name, tuple(high - low for low, high in spans)
