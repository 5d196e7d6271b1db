"""Ports of DeepSpeed's learning rate schedulers, as code that is written into a migrated file (deepspeed 0.19.8
runtime/lr_schedules.py).
"""

from __future__ import annotations

from typing import Any

from .draft import Draft
from .ds_config import entry
from .ds_setup import Setup, spelled
from .edit import Piece
from .plan import Line
from .wraps import Wrap

WARMUP = '''class Warmup(TORCH.optim.lr_scheduler.LRScheduler):
    """DeepSpeed's WarmupLR and, with `total` steps, WarmupDecayLR: the first two updates both run at the rate `low`."""

    def __init__(self, optimizer, low=0.0, high=None, steps=1000, log=True, total=None):
        self.low, self.high, self.steps, self.log, self.total = low, high, max(2, steps), log, total
        super().__init__(optimizer)

    def get_lr(self):
        done = max(self.last_epoch - 1, 0)
        if done < self.steps:
            part = (1.0 / MATH.log(self.steps)) * MATH.log(done + 1) if self.log else done / self.steps
        elif self.total is None:
            part = 1.0
        else:
            part = max(0.0, float(self.total - done) / float(max(1.0, self.total - self.steps)))
        highs = self.base_lrs if self.high is None else [self.high] * len(self.base_lrs)
        return [self.low + (high - self.low) * part for high in highs]'''

COSINE = '''def warmup_cosine(step, total, steps=1000, low=0.0, floor=0.0001, log=True):
    """DeepSpeed's WarmupCosineLR as a factor of the learning rate: 0 for the first update, then one step behind."""
    if step == 0:
        return 0.0
    done, steps = step - 1, max(2, steps)
    if done < steps:
        part = (1.0 / MATH.log(steps)) * MATH.log(done + 1) if log else done / steps
        return low + part * (1.0 - low)
    progress = min(1.0, (done - steps + 1) / max(1, total - steps))
    return max(0.0, floor + (1.0 - floor) * (1 + MATH.cos(MATH.pi * progress)) / 2)'''

RANGE = '''class RangeTest(TORCH.optim.lr_scheduler.LRScheduler):
    """DeepSpeed's LRRangeTest: the rate grows from `low` by `rate` every `size` steps."""

    def __init__(self, optimizer, low=1e-3, size=2000, rate=1.0, staircase=False):
        self.low, self.size, self.rate, self.staircase = low, size, rate, staircase
        super().__init__(optimizer)

    def get_lr(self):
        grown = self.last_epoch // self.size if self.staircase else self.last_epoch / self.size
        return [self.low * (1 + self.rate * grown)] * len(self.base_lrs)'''

# DeepSpeed's parameter -> the port's, by scheduler.
_WARMUP = {"warmup_min_lr": "low", "warmup_max_lr": "high", "warmup_num_steps": "steps", "total_num_steps": "total"}
_COSINE = {
    "total_num_steps": "total",
    "warmup_num_steps": "steps",
    "warmup_min_ratio": "low",
    "cos_min_ratio": "floor",
}
_RANGE = {
    "lr_range_test_min_lr": "low",
    "lr_range_test_step_size": "size",
    "lr_range_test_step_rate": "rate",
    "lr_range_test_staircase": "staircase",
}


def scheduler_lines(draft: Draft, wrap: Wrap, setup: Setup) -> list[Line]:
    """`scheduler = ...` for the scheduler of a config; the class it needs is written into the file."""
    kind = entry(setup.tree, "scheduler.type")
    given: dict[str, Any] = dict(entry(setup.tree, "scheduler.params", {}))
    torch, math = draft.need_module("torch"), draft.need_module("math")

    def written(name: str, text: str) -> None:
        draft.helpers.setdefault(name, text.replace("TORCH", torch).replace("MATH", math))

    if kind == "WarmupDecayLR":
        given.setdefault("warmup_max_lr", 0.001)
    names = {"WarmupCosineLR": _COSINE, "LRRangeTest": _RANGE}.get(kind, _WARMUP)
    arguments: list[Piece] = []
    for key, name in names.items():
        if given.get(key) is not None:
            line = spelled(draft, wrap, given[key])
            if line is None:
                draft.todo(wrap.call, f"{key} of the scheduler comes from where it cannot be named here")
            else:
                arguments += [f", {name}=", *line]
    if given.get("warmup_type", "log") == "linear":
        arguments.append(", log=False")
    if kind == "WarmupCosineLR":
        written("warmup_cosine", COSINE)
        partial = draft.need("functools", "partial")
        call = f"{setup.scheduler} = {torch}.optim.lr_scheduler.LambdaLR({setup.optimizer}, {partial}(warmup_cosine"
        return [(call, *arguments, "))")]
    name = "RangeTest" if kind == "LRRangeTest" else "Warmup"
    written(name, RANGE if kind == "LRRangeTest" else WARMUP)
    return [(f"{setup.scheduler} = {name}({setup.optimizer}", *arguments, ")")]
