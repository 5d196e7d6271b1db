"""One tree from the trees of all ranks: parts become tensors, equal values stay, what differs is a fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.spec import Piece, Tensor, TensorSpec
from ..core.tree import Path, Tree, dotted, rank_key, walk
from ._chunks import chunk_faults
from ._rank_parts import Sharded, sharded_leaves

_SMALL = 1 << 20  # bytes; tensors that every rank holds are compared up to this size and taken for replicas above it
# Where ranks differ in one of these, their files are of two different steps.
STEPS = frozenset({"step", "global_step", "global_steps", "iteration", "epoch", "last_epoch", "_step_count"})


@dataclass(slots=True)
class Merge:
    """Merges trees and collects the faults: `(path, what)`. `holes` allows ranks that lack an entry (FSDP1's optimizer
    has none for a parameter of which a rank holds nothing)."""

    holes: bool = False
    faults: list[tuple[Path, str]] = field(default_factory=list)

    def tree(self, values: Mapping[int, Tree], path: Path = ()) -> Tree:
        """The tree of the values by rank."""
        some = values[min(values)]
        if all(isinstance(value, Sharded) for value in values.values()):
            return self._tensor(values, path)
        if all(isinstance(value, Mapping) for value in values.values()):
            return self._mapping(values, path)
        if all(isinstance(value, list | tuple) and len(value) == len(some) for value in values.values()):
            return type(some)(
                self.tree({rank: value[index] for rank, value in values.items()}, (*path, index))
                for index in range(len(some))
            )
        for rank, value in values.items():
            if not is_equal(some, value):
                self.faults.append((path, f"{_said(some)} on rank {min(values)} and {_said(value)} on rank {rank}"))
                break
        return some

    def _mapping(self, values: Mapping[int, Mapping[Any, Tree]], path: Path) -> dict[Any, Tree]:
        out = {}
        for key in dict.fromkeys(key for value in values.values() for key in value):
            held = {rank: value[key] for rank, value in values.items() if key in value}
            if len(held) < len(values) and not self.holes:
                lacking = [str(rank) for rank in values if rank not in held]
                self.faults.append(((*path, key), f"it is not in the files of rank {', '.join(lacking)}"))
            out[key] = self.tree(held, (*path, key))
        return out

    def _tensor(self, values: Mapping[int, Sharded], path: Path) -> Tensor:
        first = values[min(values)]
        pieces: dict[Any, Piece] = {}
        for rank, value in values.items():
            if (value.shape, value.dtype) != (first.shape, first.dtype):
                other = f"{value.dtype} {value.shape} on rank {rank}"
                self.faults.append((path, f"{first.dtype} {first.shape} and {other}"))
                continue
            for box, stored in value.parts:
                # Replicas of a box (a mesh with a replicated dimension) hold the same values.
                pieces.setdefault(box, Piece(box, stored.pieces[0].place, stored.spec.dtype))
        self.faults += [(path, fault) for fault in chunk_faults(first.shape, pieces)]
        return Tensor(TensorSpec(first.shape, first.dtype), tuple(pieces.values()), _storage(values))

    def lines(self) -> list[str]:
        """The faults in words."""
        return [f"{dotted(path)}: {fault}" for path, fault in self.faults]


def _storage(values: Mapping[int, Sharded]) -> object:
    """Equal for two names of one parameter: they share their storage in every rank's file."""
    stored = tuple((rank, part.storage) for rank, value in sorted(values.items()) for _, part in value.parts)
    return stored if stored and all(storage is not None for _, storage in stored) else None


def is_equal(a: Tree, b: Tree) -> bool:
    """Whether two ranks hold the same: tensors by their bytes up to 1 MiB, arrays by value, all else by `==`."""
    left, right = list(walk(a)), list(walk(b))
    return [path for path, _ in left] == [path for path, _ in right] and all(
        _same(x, y) for (_, x), (_, y) in zip(left, right, strict=True)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.spec.shape, a.spec.dtype) != (b.spec.shape, b.spec.dtype):
            return False
        return a.spec.nbytes > _SMALL or _bytes(a) == _bytes(b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    # A NaN is equal to itself here: the same value was saved twice.
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _bytes(tensor: Tensor) -> bytes:
    data = bytearray(tensor.spec.nbytes)
    if data:
        tensor.pieces[0].place.read_into(0, memoryview(data))
    return bytes(data)


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        if value.spec.numel == 1:
            number = np.frombuffer(_bytes(value), value.spec.dtype)[0] if value.spec.dtype != "bfloat16" else "another"
            return str(number)
        return f"a {value.spec.dtype} tensor of shape {value.spec.shape}"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def extra(name: str, values: Mapping[int, Tree]) -> tuple[Tree, list[str]]:
    """An extra of all ranks: one value where all have the same, else `{"rank_0": ..., "rank_1": ...}`.

    With it come the faults: parts that make no tensor, and ranks whose steps differ.
    """
    merge = Merge()
    merged = merge.tree(values, (name,))
    if not merge.faults:
        return merged, []
    if any(sharded_leaves(value) for value in values.values()):
        return merged, merge.lines()
    steps = [(path, fault) for path, fault in merge.faults if path[-1] in STEPS]
    own = {rank_key(rank): value for rank, value in sorted(values.items())}
    return own, [f"{dotted(path)}: {fault}" for path, fault in steps]
