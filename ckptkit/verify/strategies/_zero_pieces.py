"""What one rank of a DeepSpeed engine holds of weights, masters and moments, as pieces by name.

Read from the optimizers' own flat buffers: `safe_get_full_*` answers for the first group alone under ZeRO 1 and 2, and
for the wrong elements under round_robin_gradients (0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._gather import Piece, state_pieces


def engine_pieces(engine: Any) -> list[Piece]:
    """Pieces of everything that this rank holds; masters only where the weights are of lower precision."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        found = _stage3(names, engine.module.parameters(), optimizer)
    else:
        found = [Piece(names[id(p)], "value", None, p.data) for p in engine.module.parameters()]
        if hasattr(optimizer, "round_robin_bit16_groups"):
            found += _stage12(names, optimizer)
        elif hasattr(optimizer, "bf16_groups"):
            found += _bf16_optimizer(names, optimizer)
        else:
            found += _stage0(names, optimizer)
    low_precision = next(engine.module.parameters()).dtype != torch.float32
    return [piece for piece in found if piece.slot != "master" or low_precision]


def _stage0(names: Mapping[int, str], optimizer: Any) -> Iterator[Piece]:
    """Everything on every rank: a torch optimizer, or for bf16 FP16_UnfusedOptimizer with its lists of fp32 copies."""
    low = getattr(optimizer, "fp16_groups", None)
    if low is None:
        for p, state in optimizer.state.items():
            yield from state_pieces(names[id(p)], state)
        return
    for weights, masters in zip(low, optimizer.fp32_groups, strict=True):
        for p, master in zip(weights, masters, strict=True):
            yield Piece(names[id(p)], "master", None, master)
            yield from state_pieces(names[id(p)], optimizer.optimizer.state[master])


def _stage12(names: Mapping[int, str], optimizer: Any) -> Iterator[Piece]:
    """A group is one vector, in the order of `round_robin_bit16_groups`, padding between parameters in the offsets."""
    rank = dist.get_rank()
    for index, params in enumerate(optimizer.round_robin_bit16_groups):
        begin = rank * optimizer.partition_size[index]
        offsets = optimizer.round_robin_bit16_offsets[index]
        flat = optimizer.single_partition_of_fp32_groups[index]
        yield from _cut(names, params, offsets, begin, flat, optimizer.optimizer.state.get(flat, {}))


def _bf16_optimizer(names: Mapping[int, str], optimizer: Any) -> Iterator[Piece]:
    rank = dist.get_rank()
    for params, flat in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
        offsets = [sum(p.numel() for p in params[:i]) for i in range(len(params))]
        yield from _cut(names, params, offsets, rank * flat.numel(), flat, optimizer.optimizer.state.get(flat, {}))


def _cut(
    names: Mapping[int, str],
    params: Sequence[Tensor],
    offsets: Sequence[int],
    begin: int,
    flat: Tensor,
    state: Mapping[str, Tensor],
) -> Iterator[Piece]:
    """The part of each parameter that lies in this rank's [begin, begin + flat.numel()) of a group's vector."""
    vectors = {"master": flat.detach(), **{slot: v for slot, v in state.items() if v.dim()}}
    for p, offset in zip(params, offsets, strict=True):
        low, high = max(offset, begin), min(offset + p.numel(), begin + flat.numel())
        if low < high:
            for slot, vector in vectors.items():
                yield Piece(names[id(p)], slot, low - offset, vector[low - begin : high - begin])
        yield from state_pieces(names[id(p)], {slot: v for slot, v in state.items() if not v.dim()})


def _stage3(names: Mapping[int, str], params: Any, optimizer: Any) -> list[Piece]:
    """Each parameter is cut on its own into ceil(numel / ranks); a sub-group joins its parameters' cuts."""
    pieces = [_trimmed(names[id(p)], "value", p, p.ds_tensor.data) for p in params]
    for sub_group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        state = optimizer.optimizer.state.get(flat, {})
        vectors = {"master": flat.detach(), **{slot: v for slot, v in state.items() if v.dim()}}
        offset = 0
        for p in sub_group:
            size = p.partition_numel()
            for slot, vector in vectors.items():
                pieces.append(_trimmed(names[id(p)], slot, p, vector[offset : offset + size]))
            pieces += state_pieces(names[id(p)], {slot: v for slot, v in state.items() if not v.dim()})
            offset += size
    return [piece for piece in pieces if piece.data.numel()]


def _trimmed(name: str, slot: str, p: Any, part: Tensor) -> Piece:
    """A rank's cut of one parameter without the padding at the parameter's end."""
    start = min(dist.get_rank() * p.partition_numel(), p.ds_numel)
    return Piece(name, slot, start, part.flatten()[: p.ds_numel - start])
