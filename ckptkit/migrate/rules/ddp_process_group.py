"""process_group and device_mesh of DDP become the mesh of fully_shard.

What: a process group is made into a one-dimensional mesh, a device mesh is passed on.

Before::

    model = DDP(model, process_group=group)

After::

    fully_shard(model, mesh=DeviceMesh.from_group(group, "cuda"))

In numbers: equal.

Known limits: with a group that is not all ranks, the ranks outside of it must not call `fully_shard` with it, as they
must not build DDP with it.
"""

from __future__ import annotations

from ..draft import Draft
from ..grade import Grade
from ..replicas import knows_only_cpu
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
            device = "cpu" if knows_only_cpu(draft) else "cuda"
            spelled = (f"{mesh}.from_group(", *spelled, f', "{device}")')
        wrap.plan.kwargs["mesh"] = spelled
        wrap.plan.shared["mesh"] = ("mesh", "device_mesh")
        draft.note(wrap.call, Grade.EXACT, f"{name} becomes the mesh")
