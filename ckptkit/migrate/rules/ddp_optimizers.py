"""Optimizers that shard or average for DDP are left to a person: FSDP2 shards every optimizer's state by itself.

What: `ZeroRedundancyOptimizer(...)` and `PostLocalSGDOptimizer(...)` get a TODO with what to write.

Why: they broadcast and average whole parameters, which raises on the DTensors of a sharded model.

Before::

    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)

To do::

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

`consolidate_state_dict` goes: `get_optimizer_state_dict` gathers.

In numbers: the sharding of the state changes none; local SGD is another algorithm than synchronous training.

Known limits: optimizers of other packages are not known.
"""

from __future__ import annotations

from ..draft import Draft

SOURCES = ("ddp",)
_TODO = {
    "torch.distributed.optim.ZeroRedundancyOptimizer": "FSDP2 shards the state of every optimizer: make "
    "optimizer_class(model.parameters(), ...) itself, and drop consolidate_state_dict",
    "torch.distributed.optim.PostLocalSGDOptimizer": "local SGD averages whole parameters, which FSDP2 does not hold: "
    "train synchronously, or keep DDP",
}


def rewrite(draft: Draft) -> None:
    """Report them."""
    if not any(wrap.source == "ddp" and not wrap.plan.refused for wrap in draft.all_wraps):
        return
    for name, message in _TODO.items():
        for call in draft.calls(name):
            draft.todo(call, message)
