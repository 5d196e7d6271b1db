"""What each rank runs to resume a checkpoint: a run from other weights, the checkpoint read into it, more steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .runner import environment, group_settings, optimizer_states, weights
from .strategies import Options, get_strategy
from .summary import summarize_all
from .trace import Trace
from .workload import Workload

OTHER_SEED = 9173  # not the seed of any run: weights that were not loaded are seen


@dataclass(frozen=True, slots=True)
class Resumed:
    """`reader` says which API read the checkpoint, and why the ones before it did not."""

    trace: Trace
    reader: str


def resume(
    name: str, forms: tuple[str, ...], path: str, workload: Workload, options: Options, steps: int
) -> Resumed | None:
    """Collective; rank 0 answers. Reads `path` with the strategy's own API where one of `forms` fits, then with torch's
    distributed checkpoint for the model, the optimizer and what extras there are, and at last with `ckptkit.load`.

    Raises what the last reader raised.
    """
    run, reader = _read(name, forms, path, workload, options)
    start = run.full_state()
    records = [replace(run.step(), step=0)]
    first = run.full_state()
    records += [replace(run.step(), step=i) for i in range(1, steps)]
    end = run.full_state()
    if dist.get_rank() != 0:
        return None
    trace = Trace(
        label=name, strategy=name, world_size=dist.get_world_size(), precision=options.precision, steps=tuple(records),
        initial=summarize_all(weights(start)), after_first=summarize_all(weights(first)),
        final=summarize_all(weights(end)), optimizer_first=summarize_all(optimizer_states(first)),
        optimizer=summarize_all(optimizer_states(end)), groups=group_settings(start),
        environment=environment(options.device),
    )  # fmt: skip
    return Resumed(trace, reader)


def _read(name: str, forms: tuple[str, ...], path: str, workload: Workload, options: Options) -> tuple[Any, str]:
    readers: list[tuple[str, Callable[[Any], None]]] = [
        (f"read by {name}'s own API ({form})", partial(_by_form, path=path, form=form)) for form in forms
    ]
    if Path(path, ".metadata").exists() and not name.startswith("zero"):
        readers.append(("read by torch.distributed.checkpoint and set_state_dict", partial(_by_dcp, path=path)))
    readers.append(("read by ckptkit.load", partial(_by_ckptkit, path=path, factory=workload.model)))
    refused = ""
    for number, (says, read) in enumerate(readers):
        # Each try gets a run of its own: what a failed one has left behind must not help the next.
        run = get_strategy(name).build(workload, replace(options, seed=OTHER_SEED))
        try:
            read(run)
        except (Exception, CheckpointException) as error:
            if number == len(readers) - 1:
                raise
            refused = refused or f"; {says.partition('(')[2].rstrip(')') or 'it'} does not fit: {_line(error)}"
        else:
            return run, says + refused
    raise AssertionError("unreachable")


def _by_form(run: Any, path: str, form: str) -> None:
    run.load(Path(path), form)


def _by_dcp(run: Any, path: str) -> None:
    held = {key.partition(".")[0] for key in FileSystemReader(path).read_metadata().state_dict_metadata}
    model, optimizer = get_state_dict(run.model, run.optimizer)
    content: dict[str, Any] = {"model": model, "optimizer": optimizer}
    content |= {key: value for key, value in (("scheduler", run.scheduler.state_dict()), ("step", 0)) if key in held}
    dcp_load(content, checkpoint_id=path)
    set_state_dict(run.model, run.optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    if "scheduler" in held:
        run.scheduler.load_state_dict(content["scheduler"])
    run.done = int(content.get("step", 0))


def _by_ckptkit(run: Any, path: str, factory: str) -> None:
    import ckptkit

    engine = getattr(run, "engine", None)
    model, optimizer = (run.model, run.optimizer) if engine is None else (engine, None)
    report = ckptkit.load(path, model, optimizer, run.scheduler, factory=factory)
    run.done = report.step or 0


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__
