"""What a rank runs in these tests: load a checkpoint with the framework's own loader, gather everything, train on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptkit.verify.strategies import FullState, Options, get_strategy
from ckptkit.verify.workload import Workload


@dataclass(slots=True)
class Resumed:
    """What a run held after loading, what it computed from there, and the optimizer's steps at the end."""

    state: FullState | None
    losses: list[float]
    steps: dict[str, float]
    global_steps: int
    client: dict[str, Any]


def resume(
    strategy: str,
    path: str,
    *,
    form: str = "native",
    options: dict[str, Any] | None = None,
    workload: dict[str, str] | None = None,
    steps: int = 3,
    repair: str | None = None,
    gather: bool = True,
) -> Resumed | None:
    """Collective. A run of another seed loads `path` and trains `steps` more; the answer of rank 0.

    `repair`: a truth.pt from which buffers and frozen parameters are set by hand, which DeepSpeed leaves alone when it
    loads a universal checkpoint. Without `gather` only the losses are of interest (ranks that do not agree).
    """
    made = Options(**{**(options or {}), "seed": 5})
    run = get_strategy(strategy).build(Workload(**(workload or {})), made)
    run.engine._config.load_universal_checkpoint = form == "universal"
    found, client = run.engine.load_checkpoint(path)
    assert found is not None
    run.done = run.engine.global_steps
    state = run.full_state() if gather else None
    if repair is not None:
        _set_the_rest(run.engine.module, torch.load(repair, weights_only=True))
    losses = [run.step().loss for _ in range(steps)]
    end = run.full_state() if gather else None
    counted = {fqn: float(t) for (fqn, slot), t in end.tensors.items() if slot == "step"} if end else {}
    if torch.distributed.get_rank():
        return None
    return Resumed(state, losses, counted, run.engine.global_steps - steps, {"note": client.get("note")})


def _set_the_rest(module: torch.nn.Module, tensors: dict[tuple[str, str], torch.Tensor]) -> None:
    frozen = [(name, p.data) for name, p in module.named_parameters() if not p.requires_grad]
    for name, held in (*frozen, *module.named_buffers()):
        if (name, "value") in tensors:
            held.copy_(tensors[name, "value"])


def train_on(strategy: str, path: str, out: str) -> None:
    """Collective. Load, train one step more, save with the engine."""
    run = get_strategy(strategy).build(Workload(), Options())
    run.load(Path(path), "native")
    run.step()
    run.save(Path(out), "native")


def to_universal(native: Path, out: Path) -> None:
    """DeepSpeed's own conversion, without processes of its own."""
    import argparse

    from deepspeed.checkpoint.ds_to_universal import main

    tag = (native / "latest").read_text()
    main(
        argparse.Namespace(
            input_folder=str(native / tag), output_folder=str(out / tag), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def resume_own_adam(path: str, config: dict[str, Any], steps: int = 3) -> list[Any] | None:
    """Collective. An engine that makes DeepSpeed's own Adam from its configuration (FusedAdam, or CPUAdam offloaded)
    loads `path` and trains: the class, the steps and groups after loading, the losses, the steps at the end.
    """
    import deepspeed
    import torch.distributed as dist

    from ckptkit.verify.workload import build_groups, build_model, local_batch, loss_of, rows_in

    work = Workload()
    model = build_model(work, 5)
    groups = [{k: v for k, v in g.items() if k != "lr_scale"} for g in build_groups(work, model)]
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    made = {
        "train_micro_batch_size_per_gpu": rows_in(work) // dist.get_world_size(), "gradient_clipping": 0.0,
        "steps_per_print": 10**9, **config,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=made)
    engine.load_checkpoint(path)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def counted() -> list[int]:
        return sorted({int(state["step"]) for state in inner.state.values()})

    begin = counted()
    decays = [group["weight_decay"] for group in inner.param_groups]
    losses = []
    for step in range(3, 3 + steps):
        # The warm-up of the workload, by hand: the scheduler is torch's and stayed with torch's optimizer.
        for group, base in zip(inner.param_groups, (1e-2, 5e-3), strict=True):
            group["lr"] = base * (step + 1) / 6
        loss = loss_of(engine, local_batch(work, step, part=dist.get_rank(), parts=dist.get_world_size(), device="cpu"))
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return None if dist.get_rank() else [type(inner).__name__, begin, decays, losses, counted()]


def load_fp16(path: str, stage: int) -> dict[str, Any] | None:
    """Collective. An fp16 engine, which DeepSpeed refuses on CPU unless its accelerator says otherwise, loads `path`.

    Answers what it holds: the model's weights, the attributes of its loss scaler, and the loss of a step.
    """
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from ckptkit.verify.strategies._gather import exchange
    from ckptkit.verify.strategies._names import names_of
    from ckptkit.verify.strategies._zero_pieces import engine_pieces
    from ckptkit.verify.workload import build_groups, build_model, build_optimizer, rows_in

    type(get_accelerator()).is_fp16_supported = lambda self: True
    work = Workload()
    model = build_model(work, 5)
    optimizer = build_optimizer("adamw", build_groups(work, model))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": rows_in(work) // dist.get_world_size(), "fp16": {"enabled": True},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(path, load_lr_scheduler_states=False)
    tensors = exchange(engine_pieces(engine), names_of(work).shapes)
    scaler = engine.optimizer.loss_scaler
    scale = vars(scaler) if hasattr(scaler, "cur_scale") else {"cur_scale": engine.optimizer.cur_scale}
    return None if dist.get_rank() else {"tensors": tensors, "scaler": {k: v for k, v in scale.items() if k != "dtype"}}
