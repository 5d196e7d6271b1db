"""sync_module_states=True becomes a broadcast of rank 0's parameters and buffers before sharding.

What: the argument is replaced by a loop over parameters and buffers.

Why: FSDP1 broadcast rank 0's weights while wrapping. `fully_shard` never does: each rank keeps its rows of its own
weights, so ranks that were seeded differently, or of which only one loaded a checkpoint, train a patchwork.

Before::

    model = FSDP(model, device_id=device, sync_module_states=True)

After::

    model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    fully_shard(model)

In numbers: equal.

Known limits: the whole model is moved to the device before it is sharded (FSDP1 did so unit by unit when there was a
policy). With `param_init_fn` and meta parameters on all but rank 0 see the rule meta-device.
"""

from __future__ import annotations

from ..draft import Draft
from ..edit import Piece
from ..grade import Grade
from ..models import literal
from ..plan import MODEL, Order
from ..rule import spell
from ..wraps import Wrap

SOURCES = ("fsdp1",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add the broadcast to the plan."""
    value = wrap.get("sync_module_states")
    if value is None or ("param_init_fn" in wrap.args and wrap.text("param_init_fn") != "None"):
        return  # with meta parameters the rule meta-device loads rank 0's weights
    truth = literal(draft, value)
    if truth is False:
        draft.note(wrap.call, Grade.EXACT, "sync_module_states=False goes")
        return
    step = draft.module.step()
    dist = draft.need_module("torch.distributed", "dist")
    lines: list[tuple[Piece, ...]] = []
    device = wrap.args.get("device_id")
    spelled = spell(draft, wrap, device) if device is not None else None
    if spelled is not None and wrap.text("device_id") != "None":
        lines.append((f"{MODEL}.to(", *spelled, ")"))
    tensor = draft.throwaway("tensor", "state")
    lines.append((f"for {tensor} in (*{MODEL}.parameters(), *{MODEL}.buffers()):",))
    lines.append((f"{step}{dist}.broadcast({tensor}.detach(), src=0)",))
    if truth is None:
        condition = spell(draft, wrap, value)
        if condition is None:
            wrap.plan.refuse("sync-module-states", "whether to broadcast is only known at run time, out of reach here")
            return
        lines = [("if ", *condition, ":"), *((step, *line) for line in lines)]
    wrap.plan.step(Order.BROADCAST, *lines)
    draft.note(wrap.call, Grade.EXACT, "sync_module_states becomes a broadcast from rank 0 before sharding")
