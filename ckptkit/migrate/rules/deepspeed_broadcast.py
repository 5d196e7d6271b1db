"""DeepSpeed's broadcast of rank 0's weights and its choice of the device are written out before sharding.

What: the model goes to this rank's device, and a loop broadcasts parameters and buffers from rank 0.

Why: `deepspeed.initialize` does both (0.19.8 `DeepSpeedEngine._broadcast_model`). `fully_shard` keeps each rank's rows
of its own weights.

Before::

    engine, *_ = deepspeed.initialize(model=model, config=config)

After::

    model.to(local_device())
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)

In numbers: equal.

Known limits: the whole model is on the device before it is sharded; for models that do not fit see the rule
meta-device.
"""

from __future__ import annotations

import re

from ..draft import Draft
from ..ds_setup import local_device, partitioned
from ..grade import Grade
from ..plan import MODEL, Order
from ..wraps import Wrap

SOURCES = ("deepspeed",)

_INIT = re.compile(r"init_process_group\(|init_distributed\(")


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add process group, device and broadcast to the plan."""
    dist = draft.need_module("torch.distributed", "dist")
    step = draft.module.step()
    if not any(_INIT.search(module.text.masked) for module in draft.flow.program):
        wrap.plan.step(Order.DEVICE, f"if not {dist}.is_initialized():", f"{step}{dist}.init_process_group()")
        draft.note(wrap.call, Grade.EXACT, "deepspeed.initialize started the process group; now it is said")
    if partitioned(draft, wrap) is not None:
        return  # on the meta device there is nothing to send: the rule deepspeed-partitioned loads rank 0's weights
    name = local_device(draft)
    tensor = draft.throwaway("tensor", "state")
    wrap.plan.step(
        Order.BUILD,
        f"{MODEL}.to({name}())",
    )
    wrap.plan.step(
        Order.BROADCAST,
        f"for {tensor} in (*{MODEL}.parameters(), *{MODEL}.buffers()):",
        f"{step}{dist}.broadcast({tensor}.detach(), src=0)",
    )
    draft.note(wrap.call, Grade.EXACT, "the device and the broadcast of rank 0's weights are written out")
