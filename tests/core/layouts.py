"""Tensors of known values in every layout that a checkpoint has, for property tests: whole, shards, flat runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from ckptkit.core.box import Box, Shape, boxes_of_run, shard, whole
from ckptkit.core.place import Constant, Shifted
from ckptkit.core.run import pieces_of_run
from ckptkit.core.spec import Piece, Tensor, TensorSpec

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
world_sizes = st.integers(1, 7)


def numbered(shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every element differs from every other, as far as the dtype can tell."""
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape).to(dtype)


def data_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[box.within(whole(tensor.shape))]


def piece(tensor: torch.Tensor, box: Box) -> Piece:
    return Piece(box, Constant(data_of(cut(tensor, box))), name_of(tensor.dtype))


def of(tensor: torch.Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    return Tensor(TensorSpec(tuple(tensor.shape), name_of(tensor.dtype)), pieces)


@dataclass(frozen=True)
class Layout:
    """`split(tensor, world_size, rng)` answers the tensor's pieces as this layout stores them."""

    name: str
    split: Callable[[torch.Tensor, int, random.Random], Iterator[Piece]]


def _whole(tensor: torch.Tensor, world_size: int, rng: random.Random) -> Iterator[Piece]:
    yield piece(tensor, whole(tensor.shape))


def _shards(dim: int) -> Callable[[torch.Tensor, int, random.Random], Iterator[Piece]]:
    def split(tensor: torch.Tensor, world_size: int, rng: random.Random) -> Iterator[Piece]:
        if tensor.dim() <= dim:
            yield from _whole(tensor, world_size, rng)
            return
        for index in range(world_size):
            box = shard(tuple(tensor.shape), dim, world_size, index)
            if box is not None:
                yield piece(tensor, box)

    return split


def _two_dims(tensor: torch.Tensor, world_size: int, rng: random.Random) -> Iterator[Piece]:
    """A mesh of `world_size` x 2: sharded over the first dimension, and each shard over the second."""
    if tensor.dim() < 2:
        yield from _shards(0)(tensor, world_size, rng)
        return
    for row in range(world_size):
        for column in range(2):
            one, two = (shard(tuple(tensor.shape), d, n, i) for d, n, i in ((0, world_size, row), (1, 2, column)))
            both = one & two if one is not None and two is not None else None
            if both is not None:
                yield piece(tensor, both)


def _flat_group(tensor: torch.Tensor, world_size: int, rng: random.Random) -> Iterator[Piece]:
    """ZeRO-1/2, FSDP1: the tensor stands somewhere in a flat vector, which is padded and cut into equal parts."""
    before, after = rng.randrange(5), rng.randrange(5)
    flat = torch.cat([torch.full((before,), -1).to(tensor.dtype), tensor.reshape(-1),
                      torch.full((after,), -2).to(tensor.dtype)])  # fmt: skip
    length = -(-len(flat) // (2 * world_size)) * 2
    flat = torch.cat([flat, torch.full((length * world_size - len(flat),), -3).to(tensor.dtype)])
    for rank in range(world_size):
        part = flat[rank * length : (rank + 1) * length]
        start = max(rank * length - before, 0)
        stop = min((rank + 1) * length - before, tensor.numel())
        at = start + before - rank * length
        if stop > start:
            yield from pieces_of_run(
                tuple(tensor.shape), start, stop, Constant(data_of(part)), name_of(tensor.dtype), at
            )


def _partitions(tensor: torch.Tensor, world_size: int, rng: random.Random) -> Iterator[Piece]:
    """ZeRO-3: every tensor is padded by itself and cut into `world_size` equal parts."""
    length = -(-tensor.numel() // world_size)
    flat = torch.cat([tensor.reshape(-1), torch.full((length * world_size - tensor.numel(),), -3).to(tensor.dtype)])
    for rank in range(world_size):
        start, stop = rank * length, min((rank + 1) * length, tensor.numel())
        place = Constant(data_of(flat[start : start + length]))
        yield from pieces_of_run(tuple(tensor.shape), start, stop, place, name_of(tensor.dtype))


def _replicas(tensor: torch.Tensor, world_size: int, rng: random.Random) -> Iterator[Piece]:
    """Overlapping copies: whole tensor, shards of it, and random boxes, in any order."""
    pieces = [*_shards(0)(tensor, world_size, rng), *_flat_group(tensor, world_size, rng)]
    for _ in range(3):
        offsets = tuple(rng.randint(0, size) for size in tensor.shape)
        sizes = tuple(rng.randint(0, size - offset) for size, offset in zip(tensor.shape, offsets, strict=True))
        pieces.append(piece(tensor, Box(offsets, sizes)))
    rng.shuffle(pieces)
    yield from pieces


def _offset(tensor: torch.Tensor, world_size: int, rng: random.Random) -> Iterator[Piece]:
    """Runs of random lengths, each at a place of its own inside a longer one."""
    at = 0
    while at < tensor.numel():
        stop = min(tensor.numel(), at + rng.randint(1, 5))
        width = tensor.element_size()
        for box in boxes_of_run(tuple(tensor.shape), at, stop):
            yield Piece(box, Shifted(Constant(bytes(width) + data_of(cut(tensor, box))), width), name_of(tensor.dtype))
        at = stop


LAYOUTS = (
    Layout("whole", _whole), Layout("dim-0 shards", _shards(0)), Layout("dim-1 shards", _shards(1)),
    Layout("2-D shards", _two_dims), Layout("flat group", _flat_group), Layout("ZeRO-3", _partitions),
    Layout("replicas", _replicas), Layout("runs", _offset),
)  # fmt: skip
layouts = st.sampled_from(LAYOUTS)


def laid_out(tensor: torch.Tensor, layout: Layout, world_size: int, seed: int) -> Tensor:
    """The tensor in a layout; `seed` decides what the layout leaves open."""
    return of(tensor, tuple(layout.split(tensor, world_size, random.Random(seed))))
