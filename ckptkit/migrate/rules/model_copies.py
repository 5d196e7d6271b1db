"""A deep copy of the sharded model (EMA, reference model) is taken before sharding, and sharded as well.

What: `ema = copy.deepcopy(model)` below the wrap, in its block, moves before the sharding, and the copy gets the same
`fully_shard` calls.

Why: copying a module after `fully_shard` raises AssertionError.

Before::

    model = FSDP(model)
    ema = copy.deepcopy(model)

After::

    ema = copy.deepcopy(model)
    fully_shard(model)
    fully_shard(ema)

In numbers: equal.

Known limits: a copy in another block or function, and `torch.optim.swa_utils.AveragedModel(model)`, which copies, are
left with a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..plan import MODEL, Order
from ..wraps import Wrap

SOURCES = ("fsdp1", "ddp")
AVERAGED = "torch.optim.swa_utils.AveragedModel"


def plan(draft: Draft, wrap: Wrap) -> None:
    """Copy before sharding."""
    for statement, target in _copies(draft, wrap):
        call = statement.value
        assert isinstance(call, cst.Call)
        wrap.plan.step(Order.CHECKPOINTING, (f"{target} = ", draft.module.span(call.func), f"({MODEL})"))
        wrap.plan.copies.append(target)


def rewrite(draft: Draft) -> None:
    """Remove the copies that moved; report the others."""
    moved: list[cst.CSTNode] = []
    for wrap in draft.wraps:
        for statement, _ in [] if wrap.plan.refused else _copies(draft, wrap):
            draft.delete(statement)
            draft.note(statement, Grade.EXACT, "the copy is taken before sharding, and sharded too")
            moved.append(statement)
    for call in draft.calls("copy.deepcopy", AVERAGED):
        if call.args and draft.module.statement(call) not in moved and draft.wraps_of(call.args[0].value):
            draft.todo(call, "a sharded model cannot be copied: copy it before fully_shard, and shard the copy too")


def _copies(draft: Draft, wrap: Wrap) -> list[tuple[cst.Assign, str]]:
    """`target = copy.deepcopy(model)` statements below the wrap in its block."""
    module = draft.module
    here = module.line(wrap.call)
    found = []
    for line in getattr(module.parent(here), "body", ()) if not isinstance(here, cst.SimpleStatementSuite) else ():
        if module.span(line).start <= module.span(here).start:
            continue
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if not isinstance(small, cst.Assign) or len(small.targets) != 1:
                continue
            value = small.value
            if not isinstance(value, cst.Call) or len(value.args) != 1 or draft.name(value.func) != "copy.deepcopy":
                continue
            target = small.targets[0].target
            is_mine = any(o.node is wrap.call for o in draft.origins(value.args[0].value))
            if is_mine and isinstance(target, (cst.Name, cst.Attribute)) and not module.skips(small):
                found.append((small, draft.code(target)))
    return found
