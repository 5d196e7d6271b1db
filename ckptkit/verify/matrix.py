"""Strategies form: the same training under every strategy, precision and optimizer, on one pool of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..errors import UsageError
from .options import MatrixOptions
from .pool import Pool
from .report import Finding, Report, judge, versions
from .runner import REFERENCE, prepare, run_one
from .script import resolve_device
from .strategies import Options, all_strategies, get_strategy
from .tolerance import tolerance_for
from .workload import Workload

# SGD with clipping is in the default run because Adam divides the scale of the gradient out: a wrong divisor or a
# missing clip does not show under it.
DEFAULT_OPTIMIZERS = (("adamw", None), ("sgd", 0.5))
DEFAULT_PRECISIONS = ("fp32", "bf16")


def verify_strategies(options: MatrixOptions, progress: Callable[[str], None] = lambda doing: None) -> Report:
    """Trains every combination and holds it against a single process; `progress` is told what is being trained.

    Raises UsageError for an unknown strategy, for a model without its batches, and for a batch that cannot be split.
    """
    began = time.monotonic()
    device = resolve_device(options.device)
    ranks = options.world_size or default_ranks(device)
    workload = workload_of(options.model, options.batch)
    names = options.strategies or tuple(name for name in all_strategies() if name != "single")
    for name in names:
        get_strategy(name)
    for precision, _, _ in _combinations(options):
        tolerance_for(precision, options.tolerance)
    findings: list[Finding] = []
    environment: dict[str, str] = {}
    prepare(names, device)
    with Pool(ranks, device=device) as pool:
        for precision, optimizer, clip in _combinations(options):
            group = f"{precision} · {optimizer}" + (f", clip {clip:g}" if clip else "")
            how = Options(precision, optimizer, clip, options.accumulate, options.seed, device)
            traces = []
            for name, size in [(REFERENCE, 1), *((name, ranks) for name in names if name != REFERENCE)]:
                progress(f"{group}: {name}")
                traces.append(run_one(pool, name, workload, how, size, options.steps))
            reference, *candidates = traces
            environment.update(reference.environment)
            bounds = tolerance_for(precision, options.tolerance)
            reference = replace(reference, label="single process")
            named = (replace(candidate, label=candidate.strategy) for candidate in candidates)
            findings += [judge(reference, candidate, bounds, group) for candidate in named]
    facts = {
        **environment, **versions(), "device": device, "world size": str(ranks), "steps": str(options.steps),
        "accumulate": str(options.accumulate), "seed": str(options.seed),
    }  # fmt: skip
    title = f"{options.model or 'the default model'} under {len(names)} strategies"
    return Report("strategies", title, tuple(findings), facts, device_notes(device, ranks), time.monotonic() - began)


def workload_of(model: str | None, batch: str | None) -> Workload:
    """The user's model and batches, or the default workload. Raises UsageError for one without the other."""
    if (model is None) != (batch is None):
        raise UsageError(
            "--model and --batch go together",
            why="batches of the default model do not fit another one",
            hint="--model pkg.mod:factory --batch pkg.mod:function",
        )
    return Workload() if model is None or batch is None else Workload(model=model, batch=batch)


def default_ranks(device: str) -> int:
    """As many ranks as there are GPUs; two on CPU."""
    if device != "cuda":
        return 2
    import torch

    return max(torch.cuda.device_count(), 1)


def device_notes(device: str, ranks: int) -> tuple[str, ...]:
    """What a run of this size can and cannot show."""
    if ranks > 1:
        return ()
    where = "one GPU" if device == "cuda" else "one rank"
    return (
        f"{where}: this shows that every strategy computes the right numbers on this device; it cannot show that ranks "
        "agree (broadcast, gradient averaging, uneven shards), for which two are needed (--device cpu --world-size 2)",
    )


def _combinations(options: MatrixOptions) -> Iterator[tuple[str, str, float | None]]:
    clips = dict(DEFAULT_OPTIMIZERS)
    for precision in options.precisions or DEFAULT_PRECISIONS:
        for optimizer in options.optimizers or tuple(clips):
            clip = clips[optimizer] if options.clip is None else options.clip
            yield precision, optimizer, clip or None
