"""Puts whole tensors together from pieces that the ranks hold, with one object collective that can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import FullState
from ._names import Names, clean


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + data.numel()) of the row-major flattened tensor (fqn, slot).

    A piece of `start` None is the whole tensor as it is, of any shape: a step counter, a replicated weight.
    """

    fqn: str
    slot: str
    start: int | None
    data: Tensor


def exchange(pieces: Iterable[Piece], shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, str], Tensor]:
    """Collective. Whole tensors from everybody's pieces. Raises ValueError where an element is nowhere.

    Two ranks may hold the same elements (hybrid sharding); they then have to hold the same values.
    """
    mine = [Piece(p.fqn, p.slot, p.start, p.data.detach().cpu().clone()) for p in pieces]
    everyone: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    whole: dict[tuple[str, str], Tensor] = {}
    seen: dict[tuple[str, str], Tensor] = {}
    for piece in (p for rank in everyone for p in rank):
        key = (piece.fqn, piece.slot)
        if piece.start is None:
            known = whole.setdefault(key, piece.data)
            if not torch.equal(known, piece.data):
                raise ValueError(f"{key} differs between ranks")
            continue
        size = torch.Size(shapes[piece.fqn]).numel()
        target = whole.setdefault(key, torch.zeros(size, dtype=piece.data.dtype))
        covered = seen.setdefault(key, torch.zeros(size, dtype=torch.bool))
        span = slice(piece.start, piece.start + piece.data.numel())
        if bool(covered[span].any()) and not torch.equal(target[span][covered[span]], piece.data[covered[span]]):
            raise ValueError(f"{key} differs between ranks")
        target[span] = piece.data
        covered[span] = True
    holes = [key for key, covered in seen.items() if not bool(covered.all())]
    if holes:
        raise ValueError(f"no rank holds all of {holes}")
    return {key: t.reshape(shapes[key[0]]) if key in seen else t for key, t in whole.items()}


def state_pieces(fqn: str, state: Mapping[str, Any]) -> Iterable[Piece]:
    """The tensors of one parameter's optimizer state, whole on this rank."""
    for slot, value in state.items():
        if isinstance(value, Tensor):
            yield Piece(fqn, slot, None, value)


def buffer_pieces(model: nn.Module, names: Names) -> Iterable[Piece]:
    """The saved buffers: replicated, so rank 0's is everybody's (a bool or int buffer is in no collective)."""
    if dist.get_rank() == 0:
        for name, buffer in model.named_buffers():
            if clean(name) in names.buffers:
                yield Piece(clean(name), "value", None, buffer)


def group_table(optimizer: torch.optim.Optimizer, fqns_of: Callable[[Tensor], list[str]]) -> list[dict[str, Any]]:
    """The parameter groups with FQNs in the place of parameters."""
    return [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": [n for p in group["params"] for n in fqns_of(p)],
        }
        for group in optimizer.param_groups
    ]


def full_state(
    tensors: dict[tuple[str, str], Tensor], groups: list[dict[str, Any]], names: Names, scheduler: Any, step: int
) -> FullState:
    return FullState(
        tensors=tensors,
        groups=groups,
        aliases=dict(names.aliases),
        frozen=names.frozen,
        buffers=names.buffers,
        scheduler=dict(scheduler.state_dict()),
        step=step,
    )
