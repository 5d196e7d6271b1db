"""The life of one rank of a pool's job, from the fork to the answer."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ..errors import CkptkitError

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rank:
    """What one process needs to know to become a rank."""

    rank: int
    world_size: int
    job: str
    port: int
    device: str
    timeout: float
    sys_path: tuple[str, ...]
    log: str
    function: str | Callable[..., Any]
    kwargs: Mapping[str, Any]


def run_rank(what: Rank, pipe: Connection) -> None:
    """The life of a rank: environment, process group, the function, the answer, and out when all have answered.

    Interpreter shutdown is where gloo and DeepSpeed abort at times, so the process just ends. It ends when the parent
    closes its side of the pipe: not before a slower peer is through its last collective, and not long after a parent
    that was killed. A rank that failed ends at once, which is how its peers learn of it.
    """
    gc.freeze()  # what the fork server imported is nobody's garbage: DeepSpeed collects in the middle of training
    _redirect_output(what.log)
    os.environ.update(_environment(what))
    sys.path[:] = [*what.sys_path, *(entry for entry in sys.path if entry not in what.sys_path)]
    released = threading.Thread(target=_end_when_released, args=(pipe,), daemon=True)
    released.start()
    try:
        _join_group(what)
        data = pickle.dumps(("value", _resolve(what.function)(**what.kwargs), ""))
    except BaseException as error:  # DCP's CheckpointException is a BaseException
        pipe.send_bytes(pickle.dumps(("error", _parts_of(error), traceback.format_exc())))
        _end()
    pipe.send_bytes(data)
    released.join()


def _end_when_released(pipe: Connection) -> None:
    with contextlib.suppress(OSError):
        pipe.poll(None)
    _end()


def _end() -> NoReturn:
    with contextlib.suppress(Exception):
        # Named semaphores of this rank (a progress bar's lock, say), which the parent would else report as leaked.
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _environment(what: Rank) -> dict[str, str]:
    """What torchrun would set, and what keeps many ranks on few cores quick."""
    values = {
        "RANK": str(what.rank),
        "LOCAL_RANK": str(what.rank),
        "WORLD_SIZE": str(what.world_size),
        "LOCAL_WORLD_SIZE": str(what.world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(what.port),
        "OMP_NUM_THREADS": "1",
    }
    if what.device == "cpu":
        values["DS_ACCELERATOR"] = "cpu"
    if sys.platform == "linux":
        values["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return values


def _join_group(what: Rank) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.PrefixStore(what.job, dist.TCPStore(HOST, what.port, is_master=False))
    limit = timedelta(seconds=what.timeout)
    if what.device == "cuda":
        torch.cuda.set_device(what.rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=what.rank, world_size=what.world_size, timeout=limit
        )
    else:
        dist.init_process_group("gloo", store=store, rank=what.rank, world_size=what.world_size, timeout=limit)


def _resolve(function: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _parts_of(error: BaseException) -> tuple[type[CkptkitError], dict[str, Any]] | None:
    """An error of ckptkit taken apart, as its constructors take keywords and so it does not pickle; else None."""
    return (type(error), dict(vars(error))) if isinstance(error, CkptkitError) else None
