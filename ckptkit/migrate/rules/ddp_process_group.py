"""process_group and device_mesh of DDP become the mesh of fully_shard.

What: a process group is made into a one-dimensional mesh, a device mesh is passed on.

Before::

    model = DDP(model, process_group=group)

After::

    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    fully_shard(model, mesh=mesh)

In numbers: equal.

Known limits: with a group that is not all ranks, the ranks outside of it must not call `fully_shard` with it, as they
must not build DDP with it.
"""

from __future__ import annotations

from ..draft import Draft
from ..grade import Grade
from ..plan import MODEL, Order
from ..rule import spell
from ..wraps import Wrap

SOURCES = ("ddp",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add the mesh to the plan."""
    for name in ("process_group", "device_mesh"):
        value = wrap.get(name)
        if value is None:
            continue
        spelled = spell(draft, wrap, value)
        if spelled is None:
            wrap.plan.refuse("ddp-process-group", f"{name} comes from where it cannot be named here")
            return
        if name == "process_group":
            mesh = draft.need("torch.distributed.device_mesh", "DeviceMesh")
            local = draft.throwaway("mesh", "device_mesh", value=wrap.text(name))
            device = f"next({MODEL}.parameters()).device.type"
            wrap.plan.step(Order.PREPARE, (f"{local} = {mesh}.from_group(", *spelled, f", {device})"))
            spelled = (local,)
        wrap.plan.kwargs["mesh"] = spelled
        draft.note(wrap.call, Grade.EXACT, f"{name} becomes the mesh")
