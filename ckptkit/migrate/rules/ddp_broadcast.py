"""DDP's broadcast of rank 0's weights is written out before the model is sharded.

What: a loop over parameters and buffers that broadcasts them from rank 0; none with init_sync=False.

Why: DDP sends rank 0's parameters and buffers to all ranks when it is built. `fully_shard` does not: each rank keeps
its rows of its own weights. Ranks that were seeded differently, or of which only rank 0 loaded a checkpoint, would
train a patchwork of models (torch 2.13 torch/nn/parallel/distributed.py, `_sync_module_states`).

Before::

    model = DDP(model)

After::

    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    fully_shard(model)

In numbers: equal.

Known limits: where all ranks surely hold equal weights the loop may be deleted.
"""

from __future__ import annotations

from ..draft import Draft
from ..edit import Piece
from ..grade import Grade
from ..models import literal
from ..plan import MODEL, Order
from ..rule import spell
from ..wraps import Wrap

SOURCES = ("ddp",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add the broadcast to the plan."""
    value = wrap.get("init_sync")
    truth = True if "init_sync" not in wrap.args else literal(draft, value)
    if truth is False:
        draft.note(wrap.call, Grade.EXACT, "init_sync=False: no broadcast")
        return
    group: tuple[Piece, ...] = ()
    root = "src=0"
    given = wrap.args.get("process_group")
    if given is not None and wrap.text("process_group") != "None":
        spelled = spell(draft, wrap, given)
        if spelled is None:
            return  # the rule ddp-process-group refuses
        group, root = (", group=", *spelled), "group_src=0"
    dist = draft.need_module("torch.distributed", "dist")
    tensor = draft.throwaway("tensor", "state")
    step = draft.module.step()
    lines: list[tuple[Piece, ...]] = [
        (f"for {tensor} in (*{MODEL}.parameters(), *{MODEL}.buffers()):",),
        (f"{step}{dist}.broadcast({tensor}.detach(), {root}", *group, ")"),
    ]
    if truth is None and value is not None:
        condition = spell(draft, wrap, value)
        if condition is None:
            wrap.plan.refuse("ddp-broadcast", "whether to broadcast is only known at run time, out of reach here")
            return
        lines = [("if ", *condition, ":"), *((step, *line) for line in lines)]
    wrap.plan.step(Order.BROADCAST, *lines)
    draft.note(wrap.call, Grade.EXACT, "DDP's broadcast of rank 0's weights is written out before sharding")
