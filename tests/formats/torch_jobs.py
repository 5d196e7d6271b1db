"""What a rank runs in these tests: load with the framework's own loader, gather everything, train on; save oddly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ckptkit.verify.strategies import FullState, Options, get_strategy
from ckptkit.verify.workload import Workload
from fixtures.conventions import AppState


@dataclass(slots=True)
class Resumed:
    """What a run held after loading, and the losses that it computed from there."""

    state: FullState
    losses: list[float]


def resume(
    strategy: str,
    path: str,
    *,
    form: str,
    options: dict[str, Any] | None = None,
    workload: dict[str, str] | None = None,
    steps: int = 3,
) -> Resumed | None:
    """Collective. A run of another seed loads `path` and trains `steps` more; the answer of rank 0."""
    run = get_strategy(strategy).build(Workload(**(workload or {})), Options(**{**(options or {}), "seed": 5}))
    if form in ("nested", "flat"):
        load_dcp(run, path, flat=form == "flat")
    else:
        run.load(Path(path), form)
    state = run.full_state()
    losses = [run.step().loss for _ in range(steps)]
    return Resumed(state, losses) if dist.get_rank() == 0 else None


def load_dcp(run: Any, path: str, *, flat: bool) -> None:
    """Model, optimizer, scheduler and step from a DCP directory, by `get_state_dict` and `set_state_dict`."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    content = {"model": model, "optimizer": optimizer, "scheduler": run.scheduler.state_dict(), "step": 0}
    dcp.load(content, checkpoint_id=path)
    model, optimizer = content["model"], content["optimizer"]
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)
    run.scheduler.load_state_dict(content["scheduler"])
    run.done = content["step"]


def save_without_collectives(path: str) -> dict[str, torch.Tensor]:
    """One `.metadata` a rank: a sharded tensor, a whole one, a value that all ranks share and one of each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    whole = torch.arange(3)
    content = {
        "model": {"w": distribute_tensor(full, mesh, [Shard(0)]), "b": whole},
        "step": 4,
        "seed": 10 + dist.get_rank(),
    }
    dcp.save(content, checkpoint_id=path, use_collectives=False)
    return {"w": full, "b": whole}


def save_compressed(path: str) -> dict[str, torch.Tensor]:
    """Every entry compressed with zstd by torch's own extension."""
    from torch.distributed.checkpoint._extension import ZStandard
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    content = {"w": torch.arange(4000, dtype=torch.float32).reshape(40, 100), "s": torch.tensor(2.5)}
    writer = FileSystemWriter(path, _extensions=[ZStandard()])
    dcp.save({"model": content, "step": 4}, storage_writer=writer)
    return content


def save_on_a_grid(path: str) -> dict[str, torch.Tensor]:
    """Tensors over a 2 x 2 mesh: both dimensions split, one split twice, one replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(7 * 9 * 2, dtype=torch.float64).reshape(7, 9, 2)
    placements: dict[str, list[Any]] = {
        "both": [Shard(0), Shard(1)],
        "twice": [Shard(1), Shard(1)],
        "replica": [Replicate(), Shard(0)],
        "whole": [Replicate(), Replicate()],
    }
    content = {name: distribute_tensor(full + i, mesh, each) for i, (name, each) in enumerate(placements.items())}
    dcp.save({"model": content}, checkpoint_id=f"{path}/dcp")
    Path(f"{path}/ranks").mkdir(parents=True, exist_ok=True)
    torch.save({"model": content}, f"{path}/ranks/grid_rank_{dist.get_rank()}.pt")
    return {name: full + i for i, name in enumerate(placements)}


def resume_torchtitan(path: str, *, steps: int = 3) -> Resumed | None:
    """Collective. What torchtitan's CheckpointManager does: every key that its own save would have, then all states."""
    run: Any = get_strategy("fsdp2").build(Workload(), Options(seed=5))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    train = {"step": 0, "ntokens_seen": 0}
    content: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": {"last_epoch": 0}, "train_state": train, **model}
    dcp.load(content, checkpoint_id=path)
    weights = {name: content[name] for name in model}
    set_state_dict(run.model, run.optimizer, model_state_dict=weights, optim_state_dict=optimizer, options=options)
    _go_on(run, content["lr_scheduler"]["last_epoch"])
    return _trained(run, steps)


def resume_app(path: str, *, steps: int = 3) -> Resumed | None:
    """Collective. The DCP tutorial: a stateful object under `app`, which loads itself."""
    run: Any = get_strategy("fsdp2").build(Workload(), Options(seed=5))
    dcp.load({"app": AppState(run.model, run.optimizer)}, checkpoint_id=path)
    _go_on(run, 3)
    return _trained(run, steps)


def _go_on(run: Any, step: int) -> None:
    """The schedule is a function of the step alone: it computes its rates anew, as torchtitan's does."""
    run.scheduler.last_epoch = run.done = step
    run.scheduler._step_count = step + 1


def _trained(run: Any, steps: int) -> Resumed | None:
    state = run.full_state()
    losses = [run.step().loss for _ in range(steps)]
    return Resumed(state, losses) if dist.get_rank() == 0 else None
