"""What the pool's tests run on its ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ckptkit.errors import MissingPackageError, UsageError

mark = "clean"


def total(value: float) -> tuple[float, str, str]:
    """The sum over the ranks of rank + value, and two variables of the environment."""
    tensor = torch.tensor(dist.get_rank() + value)
    dist.all_reduce(tensor)
    return float(tensor), os.environ["RANK"], os.environ["WORLD_SIZE"]


def leave_a_mark() -> str:
    """Changes a module's global, which the next job must not see."""
    global mark
    before, mark = mark, "dirty"
    return before


def process() -> int:
    return os.getpid()


def deepspeed_world() -> int:
    import deepspeed

    deepspeed.init_distributed("gloo")
    return int(deepspeed.comm.get_world_size())


def fail(rank: int, diary: str) -> None:
    """One rank raises, the others wait for it in a collective."""
    _count(diary)
    if dist.get_rank() == rank:
        raise KeyError("the reason")
    dist.barrier()


def usage(diary: str) -> None:
    _count(diary)
    raise UsageError("wrong use", hint="use it rightly", faults=["a", "b"])


def missing() -> None:
    raise MissingPackageError("nonesuch", needed_for="this job", extra="all")


def die(diary: str, times: int) -> float:
    """Rank 1 dies in the first `times` attempts."""
    if _count(diary) < times and dist.get_rank() == 1:
        print("last words", flush=True)
        os._exit(9)
    return total(0.0)[0]


def hang(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _count(diary: str) -> int:
    """How often this rank was here before."""
    path = Path(diary) / str(dist.get_rank())
    before = path.stat().st_size if path.exists() else 0
    with path.open("a") as file:
        file.write("x")
    dist.barrier()
    return before


def loaded_ops() -> list[str]:
    from deepspeed.ops.op_builder.builder import OpBuilder

    return sorted(OpBuilder._loaded_ops)
