"""Ports of DeepSpeed's learning rate schedulers, as code that is written into a migrated file (deepspeed 0.19.8
runtime/lr_schedules.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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

CYCLE = '''class OneCycle(TORCH.optim.lr_scheduler.LRScheduler):
    """DeepSpeed's OneCycle: the rate goes from `low` to `high` and back, then decays; the first beta against it."""

    def __init__(self, optimizer, low, high, decay=0.0, first=2000, second=None, stairs=0, second_stairs=None,
                 decay_steps=0, momentum=True, low_momentum=0.8, high_momentum=0.9, momentum_decay=0.0):
        self.low, self.high, self.decay, self.decay_steps = low, high, decay, decay_steps
        self.first, self.total = float(first), float(first) + float(first if second is None else second)
        self.stairs, self.second_stairs = stairs, stairs if second_stairs is None else second_stairs
        self.momentum = momentum and "betas" in optimizer.defaults
        self.low_momentum, self.high_momentum, self.momentum_decay = low_momentum, high_momentum, momentum_decay
        super().__init__(optimizer)

    def scale(self):
        top, cycles = self.first / self.total, self.last_epoch / self.total
        part = 1.0 + cycles - MATH.floor(1 + cycles)
        rises = part <= top
        stairs = self.stairs if rises else self.second_stairs
        if not stairs:
            return part / top if rises else (part - 1) / (top - 1)
        at = self.last_epoch % self.total
        falling = (self.total - at) * stairs / ((self.total - self.first) or 1)
        return MATH.floor(at * stairs / self.first if at <= self.first else falling) / stairs

    def later(self, rate):
        """The divisor of the decay behind the cycle."""
        done = self.last_epoch - self.total
        return 1 + rate * done / self.decay_steps if rate and self.decay_steps else 1

    def get_lr(self):
        rate = self.low
        if 0 < self.last_epoch <= self.total:
            rate = self.low + (self.high - self.low) * self.scale()
        elif self.last_epoch:
            rate = self.low / self.later(self.decay)
        return [rate] * len(self.base_lrs)

    def step(self, epoch=None):
        super().step(epoch)
        beta = self.low_momentum
        if 0 < self.last_epoch <= self.total:
            beta = self.high_momentum - (self.high_momentum - self.low_momentum) * self.scale()
        elif self.last_epoch:
            beta = self.high_momentum * self.later(self.momentum_decay)
        for group in self.optimizer.param_groups if self.momentum else ():
            group["betas"] = (beta, 0.99)'''


@dataclass(frozen=True, slots=True)
class Port:
    """The port of one scheduler: what is written into a file, DeepSpeed's parameters in order, and their new names."""

    name: str
    text: str
    parameters: tuple[str, ...]
    renamed: Mapping[str, str]


def _port(name: str, text: str, **renamed: str) -> Port:
    return Port(name, text, ("optimizer", *renamed, "last_batch_iteration"), renamed)


_WARMUP = {"warmup_min_lr": "low", "warmup_max_lr": "high", "warmup_num_steps": "steps", "warmup_type": "log"}
PORTS = {
    "WarmupLR": _port("Warmup", WARMUP, **_WARMUP),
    "WarmupDecayLR": _port("Warmup", WARMUP, total_num_steps="total", **_WARMUP),
    "WarmupCosineLR": _port(
        "warmup_cosine",
        COSINE,
        total_num_steps="total",
        warmup_min_ratio="low",
        warmup_num_steps="steps",
        cos_min_ratio="floor",
        warmup_type="log",
    ),
    "LRRangeTest": _port(
        "RangeTest",
        RANGE,
        lr_range_test_min_lr="low",
        lr_range_test_step_size="size",
        lr_range_test_step_rate="rate",
        lr_range_test_staircase="staircase",
    ),
    "OneCycle": _port(
        "OneCycle",
        CYCLE,
        cycle_min_lr="low",
        cycle_max_lr="high",
        decay_lr_rate="decay",
        cycle_first_step_size="first",
        cycle_second_step_size="second",
        cycle_first_stair_count="stairs",
        cycle_second_stair_count="second_stairs",
        decay_step_size="decay_steps",
        cycle_momentum="momentum",
        cycle_min_mom="low_momentum",
        cycle_max_mom="high_momentum",
        decay_mom_rate="momentum_decay",
    ),
}


def port(draft: Draft, kind: str, optimizer: Line, given: Mapping[str, Line]) -> Line:
    """A call that makes the port of a scheduler, from its arguments by DeepSpeed's names; the port is written into the
    file.
    """
    one = PORTS[kind]
    torch, math = draft.need_module("torch"), draft.need_module("math") if "MATH" in one.text else ""
    draft.helpers.setdefault(one.name, one.text.replace("TORCH", torch).replace("MATH", math))
    if kind == "WarmupDecayLR":
        given = {"warmup_max_lr": ("0.001",), **given}
    arguments: list[Piece] = []
    for key, name in one.renamed.items():
        line = given.get(key)
        if line is None or line == ("None",):
            continue
        if name == "log":
            text = "".join(map(draft.text, line)).strip("\"'")
            arguments += (
                [", log=False"] if text == "linear" else [] if text == "log" else [", log=", *line, ' != "linear"']
            )
        else:
            arguments += [f", {name}=", *line]
    if kind == "WarmupCosineLR":
        partial = draft.need("functools", "partial")
        return (f"{torch}.optim.lr_scheduler.LambdaLR(", *optimizer, f", {partial}({one.name}", *arguments, "))")
    return (f"{one.name}(", *optimizer, *arguments, ")")


def scheduler_lines(draft: Draft, wrap: Wrap, setup: Setup) -> list[Line]:
    """`scheduler = ...` for the scheduler of a config."""
    kind = entry(setup.tree, "scheduler.type")
    given: dict[str, Line] = {}
    for key, leaf in entry(setup.tree, "scheduler.params", {}).items():
        line = spelled(draft, wrap, leaf)
        if line is None or isinstance(leaf, (list, tuple)):
            draft.todo(
                wrap.call, f"{key} of the scheduler comes from where it cannot be named here, or differs by group"
            )
        elif leaf is not None:
            given[key] = line
    return [(f"{setup.scheduler} = ", *port(draft, kind, (setup.optimizer,), given))]
