"""What the ranks run: build a strategy from other weights, load or save with ckptkit, train on."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.distributed as dist

import ckptkit
from ckptkit.errors import CkptkitError
from ckptkit.verify.strategies import Options, get_strategy
from ckptkit.verify.workload import Workload

OTHER_SEED = 77  # not the seed of the fixtures: what is not loaded is seen


def resume(
    source: str, strategy: str, factory: str, options: dict[str, Any], workload: dict[str, str], steps: int
) -> list[float]:
    """Collective. Load `source` into a fresh run of a strategy and train on: the losses of every step."""
    run: Any = get_strategy(strategy).build(Workload(**workload), Options(seed=OTHER_SEED, **options))
    model = run.engine if hasattr(run, "engine") else run.model
    optimizer = None if hasattr(run, "engine") else run.optimizer
    report = ckptkit.load(source, model, optimizer, run.scheduler, factory=factory)
    run.done = report.step or 0
    return [run.step().loss for _ in range(steps)]


def train_and_save(
    target: str, strategy: str, options: dict[str, Any], steps: int, save: dict[str, Any]
) -> list[float]:
    """Collective. Train, save with ckptkit, train on: the losses after the save."""
    run: Any = get_strategy(strategy).build(Workload(), Options(**options))
    for _ in range(steps):
        run.step()
    model = run.engine if hasattr(run, "engine") else run.model
    optimizer = None if hasattr(run, "engine") else run.optimizer
    ckptkit.save(target, model, optimizer, run.scheduler, step=run.done, extras={"note": {"tokens": 7}}, **save)
    dist.barrier()
    return [run.step().loss for _ in range(steps)]


def resume_each(cells: list[dict[str, Any]], strategy: str, steps: int) -> list[list[float] | str]:
    """Collective. `resume` for each cell; one that fails answers its traceback and the others go on."""
    return [_guarded(lambda cell=cell: resume(strategy=strategy, steps=steps, **cell)) for cell in cells]


def _guarded(work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        return "".join(traceback.format_exception(error))[-1500:]


def bytes_read(source: str, strategy: str, factory: str, options: dict[str, Any], workload: dict[str, str]) -> int:
    """Collective. How many bytes this rank reads to load the source."""
    run: Any = get_strategy(strategy).build(Workload(**workload), Options(**options))
    return ckptkit.load(source, run.model, run.optimizer, factory=factory).nbytes


def load_errors(source: str, strategy: str) -> dict[str, tuple[str, list[str]]]:
    """What `load` says to a model that does not fit, and to an optimizer of another model."""
    found = {}
    run: Any = get_strategy(strategy).build(Workload(), Options())
    stranger = torch.nn.ModuleDict({"embedding": torch.nn.Linear(5, 3), "new": torch.nn.Linear(2, 2)})
    for name, model, optimizer in (
        ("other model", stranger, None),
        ("optimizer of another model", run.model, torch.optim.SGD(stranger.parameters(), lr=0.1)),
    ):
        try:
            ckptkit.load(source, model, optimizer)
        except CkptkitError as error:
            found[name] = (type(error).__name__, list(error.faults))
    return found


def save_error(target: str) -> tuple[str, str]:
    """Collective. The error that this rank gets for a target that exists."""
    run: Any = get_strategy("fsdp2").build(Workload(), Options())
    try:
        ckptkit.save(target, run.model, run.optimizer)
    except CkptkitError as error:
        return type(error).__name__, error.what
    return "", ""


def tiny_model() -> torch.nn.Module:
    """Biases of two elements and of one: on three ranks some hold nothing of them."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))


def tiny_losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def tiny_resume(source: str, target: str, strategy: str) -> tuple[list[float], list[float]]:
    """Collective. Load into a tiny model of which some ranks hold nothing, save it again, train on.

    The losses, and the step that this rank has for each parameter of which it holds a part, or for all (FSDP2).
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = tiny_model()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    if strategy == "fsdp2":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    else:
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), use_orig_params=strategy == "fsdp1",
            device_id=torch.device("cpu"),
        )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckptkit.load(source, model, optimizer)
    ckptkit.save(target, model, optimizer, format="dcp")
    dist.barrier()
    held = [p for p in model.parameters() if strategy == "fsdp2" or p.numel()]
    steps = [float(optimizer.state[p]["step"]) if p in optimizer.state else -1.0 for p in held]
    return tiny_losses(model, optimizer, range(3, 6)), steps
