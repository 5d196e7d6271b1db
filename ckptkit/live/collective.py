"""Small collectives that also work without a process group: who am I, one value for all, an error for all."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import CkptkitError


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def same(value: str) -> str:
    """Rank 0's value on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def everyone(value: Any) -> list[Any]:
    out: list[Any] = [value]
    if dist.is_initialized():
        out = [None] * dist.get_world_size()
        dist.all_gather_object(out, value)
    return out


def together(work: Any) -> None:
    """Do it, and raise on every rank what any rank raised: nobody waits for a rank that has failed."""
    error: BaseException | None = None
    try:
        work()
    except (CkptkitError, OSError, RuntimeError) as caught:
        error = caught
    failed = [each for each in everyone(error) if each is not None]
    if failed:
        raise error or failed[0]
