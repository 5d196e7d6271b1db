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

A copy that was taken above the wrap stays as it is, and has a TODO where it meets the sharded model, as in
`update(ema, model)`.

Known limits: a copy in another block or function, and `torch.optim.swa_utils.AveragedModel(model)`, which copies, are
left with a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..plan import MODEL, Order
from ..stale import precedes
from ..syntax import assigned_names
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
        if not call.args or draft.module.statement(call) in moved:
            continue
        model = call.args[0].value
        if draft.wraps_of(model):
            draft.todo(call, "a sharded model cannot be copied: copy it before fully_shard, and shard the copy too")
        elif any(precedes(draft, call, model, w) for w in draft.all_wraps if w.subject) and _meets(draft, call):
            draft.todo(
                call, "this copy stays whole, and whole tensors do not mix with shards: shard it as the model is"
            )


def _meets(draft: Draft, copy: cst.Call) -> bool:
    """Whether a copy and the sharded model come together in a call; those that objects hold are taken to."""
    statement = draft.module.statement(copy)
    targets = assigned_names(statement)
    if any(isinstance(target, cst.Attribute) for target in targets):
        return True
    for call in draft.module.every(cst.Call):
        values = [argument.value for argument in call.args]
        owners = [v.func.value if isinstance(v, cst.Call) and isinstance(v.func, cst.Attribute) else v for v in values]
        mine = [o for o in owners if any(origin.node is copy for origin in draft.origins(o))]
        if mine and any(draft.wraps_of(o) for o in owners if o not in mine):
            return True
    return False


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
