"""Runs functions as the ranks of a process group: one warm parent, forked once a job, so every job starts clean.

A fork server imports torch (and whatever else is named) once. Each job forks as many ranks from it as it wants, joins
them to a new process group, and lets them go: the next job can have another world size, and neither DeepSpeed's module
globals nor anything else that a job did to its process can reach the next one. A fork costs tens of milliseconds where
an import of torch costs seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ..errors import CkptkitError
from .rank import HOST
from .rank import Rank as _Rank
from .rank import run_rank as _run_rank

PRELOAD = {
    "cpu": ("ckptkit.verify.preload_torch", "ckptkit.verify.preload_deepspeed"),
    "cuda": ("ckptkit.verify.preload_torch",),
}
GRACE_SECONDS = 2.0  # how long the other ranks may go on reporting after the first failure
TAIL_CHARACTERS = 3000


class JobError(CkptkitError):
    """A job failed: `tracebacks` has the text of each rank that raised, `lost` the ranks that died or hung."""

    def __init__(self, what: str, *, tracebacks: Mapping[int, str], lost: Mapping[int, str]) -> None:
        faults = [f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in tracebacks.items() if text.strip()]
        super().__init__(what, faults=[*faults, *(f"rank {rank}: {text}" for rank, text in lost.items())])
        self.tracebacks = dict(tracebacks)
        self.lost = dict(lost)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.tracebacks.values()])


@dataclass(slots=True)
class _Outcome:
    """What came back from the ranks of one attempt."""

    values: dict[int, Any] = field(default_factory=dict)
    raised: dict[int, tuple[CkptkitError | None, str]] = field(default_factory=dict)
    died: dict[int, str] = field(default_factory=dict)
    hung: dict[int, str] = field(default_factory=dict)

    @property
    def worth_a_retry(self) -> bool:
        """A death may be gloo's, and its peers then raise "connection closed"; a raise alone is the job's own."""
        return bool(self.died) or not self.raised


class Pool:
    """Up to `size` ranks on this machine.

    `device` is "cpu" (gloo) or "cuda" (nccl for CUDA tensors, gloo for CPU ones; one GPU a rank). `timeout` is in
    seconds and holds for a job. A job of which a rank dies or hangs is tried `retries` times more: some gloo processes
    abort for no fault of theirs. A job that raises is not. `preload` names more modules to import once.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str = "cpu",
        timeout: float = 120.0,
        retries: int = 1,
        preload: Sequence[str] = (),
    ) -> None:
        if device not in PRELOAD:
            raise ValueError(f"a pool on {device!r}; there are {', '.join(PRELOAD)}")
        self.size = size
        self.device = device
        self.timeout = timeout
        self.retries = retries
        self._jobs = 0
        self._store: Any = None
        self._logs = tempfile.TemporaryDirectory(prefix="ckptkit-pool-")
        self._context = _context((*PRELOAD[device], *preload), device)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._store = None
        self._logs.cleanup()

    def run(
        self, function: str | Callable[..., Any], *, world_size: int, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Calls `function(**kwargs)` on ranks 0..world_size-1 of a new process group; the returned values, by rank.

        `function` is a module-level function or its name, "pkg.mod:name". Values and arguments must pickle. Raises the
        CkptkitError that a rank raised; JobError with every rank's traceback for any other exception, for a rank that
        died and for one that was not done in time; ValueError for a world size or a function that cannot be had.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"a world size of {world_size} on a pool of {self.size}")
        if getattr(function, "__module__", None) == "__main__":
            raise ValueError(
                "a job's function must live in a module that other processes can import, not in the script"
            )
        seconds = self.timeout if timeout is None else timeout
        for attempt in range(self.retries + 1):
            outcome = self._attempt(function, world_size, seconds, kwargs)
            if len(outcome.values) == world_size:
                return [outcome.values[rank] for rank in range(world_size)]
            if attempt == self.retries or not outcome.worth_a_retry:
                break
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        texts = {rank: text for rank, (_, text) in outcome.raised.items()}
        lost = outcome.died | outcome.hung
        job_error = JobError(f"{name} failed at world size {world_size}", tracebacks=texts, lost=lost)
        for error, _ in outcome.raised.values():
            if isinstance(error, CkptkitError):
                raise error from job_error
        raise job_error

    def _attempt(
        self, function: str | Callable[..., Any], world_size: int, seconds: float, kwargs: Mapping[str, Any]
    ) -> _Outcome:
        self._jobs += 1
        port = self._port()
        processes: dict[int, BaseProcess] = {}
        pipes: dict[int, Connection] = {}
        logs = {rank: Path(self._logs.name) / f"job{self._jobs}.rank{rank}" for rank in range(world_size)}
        try:
            for rank in range(world_size):
                ours, theirs = self._context.Pipe(duplex=True)
                path = tuple(sys.path)
                log = str(logs[rank])
                job = f"job{self._jobs}"
                what = _Rank(rank, world_size, job, port, self.device, seconds, path, log, function, kwargs)
                process = self._context.Process(target=_run_rank, args=(what, theirs), daemon=True)
                with _no_main_module():
                    process.start()
                theirs.close()
                processes[rank], pipes[rank] = process, ours
            return _collect(pipes, processes, logs, seconds)
        finally:
            for pipe in pipes.values():
                pipe.close()  # what every rank waits for before it ends
            for process in processes.values():
                process.join(1.0)
                if process.is_alive():
                    process.kill()
                    process.join()
            for log_file in logs.values():
                log_file.unlink(missing_ok=True)

    def _port(self) -> int:
        """The port of this pool's key-value store, bound once and for all jobs: no port can be taken in between."""
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)


def _collect(
    pipes: Mapping[int, Connection],
    processes: Mapping[int, BaseProcess],
    logs: Mapping[int, Path],
    seconds: float,
) -> _Outcome:
    """Waits for every rank's answer; after a failure only for GRACE_SECONDS more, as its peers may wait for it forever.

    A rank is judged by its answer: one that dies afterwards, on its way out, has done its work.
    """
    outcome = _Outcome()
    open_pipes = {pipe: rank for rank, pipe in pipes.items()}
    deadline = time.monotonic() + seconds
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                kind, value, text = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join(5.0)
                tail = _tail(logs[rank])
                outcome.died[rank] = f"the process died with exit code {processes[rank].exitcode}{tail}"
            else:
                if kind == "value":
                    outcome.values[rank] = value
                else:
                    outcome.raised[rank] = (_from_parts(*value) if value else None, text)
            if rank not in outcome.values:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    failed = bool(outcome.raised or outcome.died)
    limit = f"{GRACE_SECONDS:g} s of the first failure" if failed else f"{seconds:g} s"
    for rank in open_pipes.values():
        outcome.hung[rank] = f"no answer within {limit}{_tail(logs[rank])}"
    return outcome


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return f"; its last output:\n{text[-TAIL_CHARACTERS:]}" if text else ""


def _from_parts(kind: type[CkptkitError], values: Mapping[str, Any]) -> CkptkitError:
    error = kind.__new__(kind)
    error.args = (values["what"],)
    error.__dict__.update(values)
    return error


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keeps multiprocessing from running the caller's script again in every rank, name check or not."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _context(modules: Sequence[str], device: str) -> Any:
    """A fork-server context with `modules` imported; plain spawn where there is no fork (Windows).

    The server is one a Python process: a second pool shares the first one's modules and imports the rest late.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    wanted = {"OMP_NUM_THREADS": "1", **({"DS_ACCELERATOR": "cpu"} if device == "cpu" else {})}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        from multiprocessing.forkserver import ensure_running

        with _no_main_module():
            ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context
