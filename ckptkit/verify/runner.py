"""Trains one workload under many strategies on one pool of ranks; answers a trace of each, the reference first."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CkptkitError, MissingPackageError, UsageError
from .deepspeed_ops import COMM, build_ops
from .pool import JobError, Pool
from .strategies import FullState, Options, get_strategy
from .summary import summarize_all
from .trace import Trace
from .workload import Workload

REFERENCE = "single"
TAIL_LINES = 12


def run_strategies(
    workload: Workload,
    strategies: Sequence[str],
    *,
    world_size: int,
    steps: int,
    precision: str = "fp32",
    optimizer: str = "adamw",
    clip: float | None = None,
    accumulate: int = 1,
    device: str = "cpu",
    seed: int = 0,
    pool: Pool | None = None,
) -> list[Trace]:
    """One trace for the reference (a single process without a wrapper) and one for each strategy, in their order.

    A strategy whose package is missing is "not run", one that raised or died is "failed" and says why; neither stops
    the others. Raises UsageError for what no strategy can do: an unknown name, a batch that cannot be split.
    """
    options = Options(
        precision=precision, optimizer=optimizer, clip=clip, accumulate=accumulate, seed=seed, device=device
    )
    wanted = [(REFERENCE, 1), *((name, world_size) for name in strategies if name != REFERENCE)]
    for name, _ in wanted:
        get_strategy(name)
    if pool is not None:
        return [run_one(pool, name, workload, options, size, steps) for name, size in wanted]
    prepare(strategies, device)
    with Pool(world_size, device=device) as ranks:
        return [run_one(ranks, name, workload, options, size, steps) for name, size in wanted]


def prepare(strategies: Iterable[str], device: str) -> None:
    """What must be done once before the pool starts: see `deepspeed_ops`. Raises CkptkitError where it cannot be."""
    if device == "cpu" and any(get_strategy(name).package == "deepspeed" for name in strategies):
        build_ops(COMM)


def run_one(pool: Pool, name: str, workload: Workload, options: Options, world_size: int, steps: int) -> Trace:
    """The trace of one strategy; see `run_strategies` for what it says of one that did not run."""
    label = f"{name}, {options.precision}"
    try:
        traces = pool.run(train, world_size=world_size, name=name, workload=workload, options=options, steps=steps)
    except MissingPackageError as error:
        return Trace.not_run(label, name, error.what, world_size=world_size, precision=options.precision)
    except UsageError:
        raise
    except JobError as error:
        text = "\n".join(next(iter(error.tracebacks.values()), "").strip().splitlines()[-TAIL_LINES:])
        reason = "\n".join(part for part in (error.what, *error.faults, text) if part)
        return Trace.failed(label, name, reason, world_size=world_size, precision=options.precision)
    except CkptkitError as error:
        return Trace.failed(label, name, str(error), world_size=world_size, precision=options.precision)
    trace: Trace = traces[0]
    return trace


def train(name: str, workload: Workload, options: Options, steps: int) -> Trace | None:
    """What each rank runs. Collective; rank 0 answers the trace."""
    run = get_strategy(name).build(workload, options)
    start = run.full_state()
    records = [run.step()]
    first = run.full_state()
    records += [run.step() for _ in range(steps - 1)]
    end = run.full_state()
    if dist.get_rank() != 0:
        return None
    return Trace(
        label=f"{name}, {options.precision}",
        strategy=name,
        world_size=dist.get_world_size(),
        precision=options.precision,
        steps=tuple(records),
        initial=summarize_all(weights(start)),
        after_first=summarize_all(weights(first)),
        final=summarize_all(weights(end)),
        optimizer_first=summarize_all(optimizer_states(first)),
        optimizer=summarize_all(optimizer_states(end)),
        groups=group_settings(start),
        environment=environment(options.device),
    )


def weights(state: FullState) -> Mapping[str, Tensor]:
    """Parameters in fp32, masters where there are any: what strategies of mixed precision have in common."""
    masters = {fqn: t for (fqn, slot), t in state.tensors.items() if slot == "master"}
    values = {fqn: t for (fqn, slot), t in state.tensors.items() if slot == "value" and fqn not in state.buffers}
    return {fqn: masters.get(fqn, value).float() for fqn, value in values.items()}


def optimizer_states(state: FullState) -> Mapping[str, Tensor]:
    return {f"{fqn}:{slot}": t for (fqn, slot), t in state.tensors.items() if slot != "value"}


def group_settings(state: FullState) -> dict[str, dict[str, object]]:
    """Per FQN the hyper-parameters of its group."""
    return {fqn: {k: v for k, v in g.items() if k != "params"} for g in state.groups for fqn in g["params"]}


def environment(device: str) -> dict[str, str]:
    """Versions and device, for reports."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "device": device}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return {**found, **dict(_versions(("deepspeed", "accelerate")))}


def _versions(packages: Iterable[str]) -> Iterable[tuple[str, str]]:
    for package in packages:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
