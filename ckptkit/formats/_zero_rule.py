"""The two rules by which DeepSpeed cuts parameters over ranks: one vector a group (ZeRO 1, 2), or each on its own (3).

Sources: `DeepSpeedZeroOptimizer.__init__` and `_round_robin_reorder` in deepspeed/runtime/zero/stage_1_and_2.py,
`_create_fp16_sub_groups` in stage3.py, `partition_numel` in partition_parameters.py (0.19.8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..core.dtype import ITEMSIZE

_START = 2  # `nccl_start_alignment_factor`: a group's vector is padded to a multiple of this many elements a rank
_ALIGN_BYTES = 16  # of `zero_optimization.parameter_alignment`


@dataclass(frozen=True, slots=True)
class Span:
    """The flat elements `[start, stop)` of parameter number `index`; they lie at `offset` of a rank's vector."""

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatRule:
    """ZeRO 1 and 2: the parameters of a group end to end, then zeros, cut into equal partitions.

    `paddings` are the zeros after each parameter, none unless `parameter_alignment` is on. `size` is the length of a
    partition in elements; the last partitions may be padding alone.
    """

    numels: tuple[int, ...]
    paddings: tuple[int, ...]
    ranks: int
    size: int

    @classmethod
    def of(cls, numels: Sequence[int], ranks: int, paddings: Sequence[int] | None = None) -> FlatRule:
        """The rule with DeepSpeed's own partition size."""
        padded = tuple(paddings) if paddings is not None else (0,) * len(numels)
        total = sum(numels) + sum(padded)
        return cls(tuple(numels), padded, ranks, -(-total // (_START * ranks)) * _START)

    @property
    def total(self) -> int:
        """Elements of the vector without the padding at its end."""
        return sum(self.numels) + sum(self.paddings)

    def lean(self, rank: int) -> int:
        """Elements of a rank's partition without the padding at the end of the vector."""
        return max(0, min(self.size, self.total - rank * self.size))

    def spans(self, rank: int) -> Iterator[Span]:
        begin, end = rank * self.size, (rank + 1) * self.size
        ends = accumulate(n + p for n, p in zip(self.numels, self.paddings, strict=True))
        for index, (numel, padding, after) in enumerate(zip(self.numels, self.paddings, ends, strict=True)):
            first = after - padding - numel
            low, high = max(first, begin), min(first + numel, end)
            if low < high:
                yield Span(index, low - first, high - first, low - begin)


@dataclass(frozen=True, slots=True)
class PartitionRule:
    """ZeRO 3: every parameter is cut on its own into `ranks` parts of equal length, zeros at the end of the last.

    A rank's vector for a sub-group is its parts end to end, padding included.
    """

    numels: tuple[int, ...]
    ranks: int

    @classmethod
    def of(cls, numels: Sequence[int], ranks: int) -> PartitionRule:
        return cls(tuple(numels), ranks)

    @property
    def size(self) -> int:
        return sum(part(numel, self.ranks) for numel in self.numels)

    def spans(self, rank: int) -> Iterator[Span]:
        offset = 0
        for index, numel in enumerate(self.numels):
            size = part(numel, self.ranks)
            low, high = min(rank * size, numel), min((rank + 1) * size, numel)
            if low < high:
                yield Span(index, low, high, offset)
            offset += size


Rule = FlatRule | PartitionRule


def part(numel: int, ranks: int) -> int:
    """The length of a rank's part of one parameter under ZeRO 3, padding included."""
    return -(-numel // ranks)


def sub_groups(numels: Sequence[int], ranks: int, limit: int) -> list[list[int]]:
    """The indexes of a group's parameters by sub-group: one is full once a rank's parts reach `limit` elements."""
    sizes = [part(numel, ranks) for numel in numels]
    if limit >= sum(sizes):
        return [list(range(len(sizes)))]
    groups: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        groups[-1].append(index)
        filled += size
        if filled >= limit and index < len(sizes) - 1:
            groups.append([])
            filled = 0
    return groups


def alignment_paddings(numels: Sequence[int], dtype: str) -> list[int]:
    """The zeros after each parameter under `parameter_alignment`: the next one starts at a multiple of 16 bytes.

    `dtype` is that of the model's weights, not of the masters. Nothing follows the last parameter.
    """
    unit = _ALIGN_BYTES // math.gcd(_ALIGN_BYTES, ITEMSIZE[dtype])
    paddings: list[int] = []
    offset = 0
    for index, numel in enumerate(numels):
        padding = 0 if index == len(numels) - 1 else -(offset + numel) % unit
        paddings.append(padding)
        offset += numel + padding
    return paddings


def round_robin(count: int, ranks: int) -> list[int]:
    """The order of a group's parameters under `round_robin_gradients`: position -> index in the optimizer's order."""
    return sorted(range(count), key=lambda index: (index % ranks, index))
