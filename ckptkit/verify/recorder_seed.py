"""Makes two launches comparable: the same seeds where the script sets none, and a port that is nobody else's."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .around import around
from .recorder import Recorder, rank

SEED = "CKPTKIT_VERIFY_SEED"
SEED_RANKS = "CKPTKIT_VERIFY_SEED_RANKS"
PORT = "CKPTKIT_VERIFY_PORT"


def seed(recorder: Recorder) -> None:
    """Seeds what the script leaves unseeded: torch, random, numpy, the same for both scripts.

    Ranks get different seeds, because unseeded ranks differ in life and a missing broadcast must show. Scripts that
    rely on equal ranks without making them equal are run with one seed for the weights (SEED_RANKS=same) instead;
    then the ranks part when the first optimizer is made, so that their random batches differ all the same.
    """
    base = int(os.environ[SEED])
    together = os.environ.get(SEED_RANKS) == "same"

    def seed_all(value: int) -> None:
        random.seed(value)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(value % 2**32)
        manual_seed(value)

    manual_seed = torch.manual_seed
    first = int(os.environ.get("RANK", "0"))
    seed_all(base if together else base + first)

    def seen(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.seeded_by_script = True
            return original(*args, **kwargs)

        return call

    around(torch, "manual_seed", seen)
    around(torch.random, "manual_seed", seen)

    def with_group(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            # Processes of mp.spawn learn their rank here; torchrun's knew it from the start and may have drawn since.
            if not recorder.seeded_by_script and not together and "RANK" not in os.environ:
                seed_all(base + rank())
            return result

        return call

    around(dist, "init_process_group", with_group)

    def with_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            if together and not recorder.seeded_by_script and not recorder.notes.get("parted"):
                recorder.notes["parted"] = "yes"
                seed_all(base + 1000 + rank())

        return call

    around(torch.optim.Optimizer, "__init__", with_optimizer)


def redirect_rendezvous() -> None:
    """Scripts that write a port into MASTER_PORT would collide with their other launch, and with anybody else's."""
    if PORT not in os.environ:
        return

    def moved(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ[PORT]
            if str(kwargs.get("init_method") or "").startswith("tcp://"):
                kwargs["init_method"] = f"tcp://127.0.0.1:{os.environ[PORT]}"
            return original(*args, **kwargs)

        return call

    around(dist, "init_process_group", moved)
