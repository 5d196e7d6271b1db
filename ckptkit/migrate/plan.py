"""What is to be emitted for one wrapped model: rules fill in a plan, and `shard.py` spells it out as statements."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import libcst as cst

from .edit import Piece

Line = tuple[Piece, ...]
MODEL = "$model"  # stands for the model's name in the lines of a step
UNIT = "$unit"  # stands for the loop variable in the condition of a unit


class Order(IntEnum):
    """Where a step stands among the statements emitted for a model (migration-reference, "Order to emit")."""

    DEVICE = 10
    BUILD = 20
    BROADCAST = 30
    PARALLEL = 40
    CHECKPOINTING = 50
    COMPILE = 60
    PREPARE = 65  # meshes and argument dicts that the shard calls use
    SHARD = 70
    INIT = 80
    LOAD = 90
    OPTIMIZER = 100
    SCHEDULER = 110


@dataclass(frozen=True, slots=True)
class Step:
    """Statements before or after the shard calls; `$model` in a piece is the model's name."""

    order: Order
    lines: tuple[Line, ...]


@dataclass(slots=True)
class Unit:
    """Submodules that become a shard group of their own: those for which `condition` (on `$unit`) holds.

    An empty condition takes every submodule. `kwargs` override the plan's.
    """

    condition: Line
    kwargs: dict[str, Line] = field(default_factory=dict)


@dataclass(slots=True)
class ShardPlan:
    """All that is emitted for one wrapped model. Rules add to it; nobody reads it before all rules have planned.

    `kwargs` go to every `fully_shard` call, `child_kwargs` and `root_kwargs` override them. `units` are tried in
    order in one loop over the submodules, children before parents; `policy` is instead a run-time policy for
    `shard_by_policy`.
    """

    kwargs: dict[str, Line] = field(default_factory=dict)
    child_kwargs: dict[str, Line] = field(default_factory=dict)
    root_kwargs: dict[str, Line] = field(default_factory=dict)
    units: list[Unit] = field(default_factory=list)
    policy: Line | None = None
    walker: tuple[str, str] = ("shard_by_policy", "policy")  # the function that applies it, and its parameter
    shared: dict[str, tuple[str, ...]] = field(default_factory=dict)  # kwarg -> wished variable, if used twice
    steps: list[Step] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    ignored: Line | None = None  # a set of modules that `shard_by_policy` leaves out
    objects: list[tuple[cst.Call, bool]] = field(default_factory=list)  # policies to rewrite where they are made
    edits: list[tuple[cst.CSTNode, Line]] = field(default_factory=list)  # of objects that the wrap is given
    edited: list[cst.CSTNode] = field(default_factory=list)  # the calls that made objects which `edits` change
    written: bool = False  # a rule has written the statement itself, with `shard.sharded`
    merged: bool = False  # the wrap is of a module that an inner wrap shards: the call falls away
    copies: list[str] = field(default_factory=list)  # further models that are sharded in the same way
    guards: list[Line] = field(default_factory=list)  # conditions on `$unit` that hold for every unit

    def step(self, order: Order, *lines: Line | str) -> None:
        """Add statements at a place in the order."""
        self.steps.append(Step(order, tuple((line,) if isinstance(line, str) else line for line in lines)))

    def refuse(self, rule: str, reason: str) -> None:
        """Leave this wrap (and all uses of the model) as they are, for a person, for a reason."""
        self.refusals.append((rule, reason))

    @property
    def refused(self) -> bool:
        return bool(self.refusals)

    @property
    def is_call(self) -> bool:
        """Whether one `fully_shard(...)` expression says it all."""
        return not self.units and self.policy is None and not self.steps
