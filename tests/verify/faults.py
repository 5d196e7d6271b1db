"""Trains a small FSDP2 model on two gloo processes, rightly or with one planted fault, and returns the traces."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptkit.verify.summary import checksum, summarize, summarize_all
from ckptkit.verify.trace import StepRecord, Trace, trace_from_json, trace_to_json

STEPS, ACCUMULATE, CLIP, WORLD = 5, 2, 0.3, 2
# planted fault -> (what it starts from, the cause that must be named)
FAULTS = {
    "no broadcast": ("sgd", "no rank-0 broadcast"),
    "no division by accumulation": ("sgd", "gradient scale"),
    "divided by the world size twice": ("adamw", "gradient scale"),
    "no clip": ("sgd", "clipping missing"),
    "no clip, norm unknown": ("sgd", "clipping missing"),
    "extra clip": ("sgd unclipped", "clipping extra"),
    "optimizer before sharding": ("adamw", "optimizer created before sharding"),
    "moments lost": ("resumed", "moments not restored"),
    "step counter lost": ("resumed", "step counter reset"),
    "one group's weight decay": ("sgd", "group hyper-parameters"),
    "one group's weight decay, groups unknown": ("sgd", "group hyper-parameters"),
    "masters in bf16": ("adamw", "dtype of masters"),
    "data order": ("sgd", "data order"),
    "data order, batches unknown": ("sgd", "data order"),
    "schedule one step late": ("sgd scheduled", "learning-rate schedule"),
    "a frozen weight trained": ("sgd", "other trained parameters"),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2))
        self.frozen = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.frozen(self.embed(x))
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h))


def batches(rank: int, order: list[int]) -> list[torch.Tensor]:
    made = []
    for index in range(STEPS * ACCUMULATE * 2):
        generator = torch.Generator().manual_seed(1000 * rank + index)
        made.append(torch.randint(0, 32, (4, 8), generator=generator))
    return [made[i] for i in order]


def groups_of(model: nn.Module, fault: str) -> list[dict]:
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    decay = 0.0 if fault.startswith("one group's weight decay") else 0.1
    return [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]


def make_optimizer(kind: str, groups: list[dict]) -> torch.optim.Optimizer:
    if kind.startswith("sgd"):
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def train(kind: str, fault: str, rank: int) -> Trace:
    torch.manual_seed(7 + (rank if fault == "no broadcast" else 0))
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_("frozen" not in name or fault == "a frozen weight trained")
    if fault == "masters in bf16":
        model = model.bfloat16()
    early = make_optimizer(kind, groups_of(model, fault)) if fault == "optimizer before sharding" else None
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = early or make_optimizer(kind, groups_of(model, fault))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: 1.0 if kind != "sgd scheduled" else (1 + max(s - (fault.startswith("schedule")), 0)) / 5
    )
    count = STEPS * ACCUMULATE
    order = list(range(count))
    if fault.startswith("data order"):
        order = order[::-1]
    data = batches(rank, order + list(range(count, 2 * count)))
    if kind == "resumed":
        for i in range(STEPS):
            one_step(model, optimizer, data[i * ACCUMULATE : (i + 1) * ACCUMULATE], "", kind)
        for state in optimizer.state.values() if fault in ("moments lost", "step counter lost") else ():
            state["step"].zero_()
            if fault == "moments lost":
                state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
        data = data[count:]
    names = {id(p): n for n, p in model.named_parameters()}
    initial, first, steps, first_state = summarize_all(model.named_parameters()), {}, [], {}
    for i in range(STEPS):
        micro = data[i * ACCUMULATE : (i + 1) * ACCUMULATE]
        rates = tuple(group["lr"] for group in optimizer.param_groups)
        loss, norm, applied = one_step(model, optimizer, micro, fault, kind)
        schedule.step()
        seen = None if fault.endswith("batches unknown") else checksum(torch.stack(micro))
        unknown = fault.endswith("norm unknown")
        steps.append(StepRecord(i, loss, None if unknown else norm, rates, None if unknown else applied, seen))
        if i == 0:
            first, first_state = summarize_all(model.named_parameters()), states(optimizer, names)
    told = {} if "unknown" in fault else {
        names.get(id(p), "?"): {k: v for k, v in g.items() if k in ("lr", "weight_decay", "momentum", "betas")}
        for g in optimizer.param_groups for p in g["params"]
    }  # fmt: skip
    return Trace(fault or "right", "fsdp2", WORLD, "fp32", tuple(steps), initial, first,
                 summarize_all(model.named_parameters()), first_state, states(optimizer, names), told)  # fmt: skip


def one_step(model, optimizer, micro, fault, kind) -> tuple[float, float, float]:
    total = torch.zeros(())
    for x in micro:
        loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(-1, 1).flatten())
        divisor = {"no division by accumulation": 1, "divided by the world size twice": ACCUMULATE * WORLD}
        (loss / divisor.get(fault, ACCUMULATE)).backward()
        total += loss.detach() / len(micro)
    clip = 1e9 if fault.startswith("no clip") or (kind != "sgd" and fault != "extra clip") else CLIP
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    norm = float(getattr(norm, "full_tensor", lambda: norm)())
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total) / WORLD, norm, min(norm, clip)


def states(optimizer, names):
    return {
        f"{names.get(id(p), f'stale{i}')}:{slot}": summarize(value)
        for i, (p, state) in enumerate(optimizer.state.items())
        for slot, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _rank(rank: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=WORLD)
    rights = {kind: train(kind, "", rank) for kind in dict.fromkeys(kind for kind, _ in FAULTS.values())}
    again = train("sgd", "", rank)
    faulty = {fault: train(kind, fault, rank) for fault, (kind, _) in FAULTS.items()}
    if rank == 0:
        made = {"right": rights, "again": {"sgd": again}, "faulty": faulty}
        text = json.dumps({part: {k: trace_to_json(t) for k, t in traces.items()} for part, traces in made.items()})
        Path(out, "traces.json").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


def all_traces() -> dict[str, dict[str, Trace]]:
    """{"right": by kind, "again": a second right run, "faulty": by fault}; one spawn for all of them, about 15 s."""
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path])
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(_rank, (out,), nprocs=WORLD)
        made = json.loads(Path(out, "traces.json").read_text())
    return {part: {k: trace_from_json(t) for k, t in traces.items()} for part, traces in made.items()}
