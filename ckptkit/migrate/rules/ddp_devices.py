"""device_ids and output_device go: fully_shard works on the current device, which must be set before.

What: `device_ids` and `output_device` are removed. Where the program never calls `torch.cuda.set_device`, the call is
added. A program that only knows the CPU gets a CPU mesh, because without a mesh `fully_shard` takes the accelerator.

Why: DDP moved inputs to device_ids[0]; `fully_shard` moves the model and the inputs to the device of its mesh, for
CUDA the current one.

Before::

    model = DDP(model.to(rank), device_ids=[rank])

After::

    torch.cuda.set_device(rank)
    fully_shard(model.to(rank))

In numbers: equal.

Known limits: a program that chooses among other devices than CUDA and CPU sets its device itself.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..models import sets_device
from ..plan import Line, Order
from ..replicas import knows_only_cpu
from ..rule import spell
from ..wraps import Value, Wrap

SOURCES = ("ddp",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Replace the arguments by a set device or a CPU mesh."""
    for name in ("output_device", "dim"):
        wrap.get(name)
    value = wrap.get("device_ids")
    if value is None:
        if knows_only_cpu(draft) and not {"device_mesh", "process_group"} & wrap.args.keys():
            mesh = draft.need("torch.distributed.device_mesh", "init_device_mesh")
            dist = draft.need_module("torch.distributed", "dist")
            wrap.plan.kwargs["mesh"] = (f'{mesh}("cpu", ({dist}.get_world_size(),))',)
            wrap.plan.shared["mesh"] = ("mesh", "device_mesh")
            draft.note(wrap.call, Grade.EXACT, "a program without accelerators gets a CPU mesh")
        return
    draft.note(wrap.call, Grade.EXACT, "device_ids goes: fully_shard uses the current device")
    if sets_device(draft):
        return
    condition, device = _chosen(draft, wrap, value)
    if device is None:
        draft.todo(wrap.call, f"call torch.cuda.set_device with the device of {wrap.text('device_ids')} before this")
        return
    torch = draft.need_module("torch")
    line: Line = (f"{torch}.cuda.set_device(", *device, ")")
    if condition is None:
        wrap.plan.step(Order.DEVICE, line)
    else:
        wrap.plan.step(Order.DEVICE, ("if ", *condition, ":"), (draft.module.step(), *line))


def _chosen(draft: Draft, wrap: Wrap, value: Value) -> tuple[Line | None, Line | None]:
    """(condition, device) of `[device]` or `[device] if condition else None`."""
    node, condition = value.node, None
    if isinstance(node, cst.IfExp):
        condition, node = spell(draft, wrap, Value(value.module, node.test)), node.body
    if isinstance(node, cst.Name):
        origins = draft.flow.origins(value.module, node)
        lists = [o for o in origins if isinstance(o.node, cst.List)]
        if len(origins) != 1 or not lists:
            return None, None
        value, node = Value(lists[0].module, lists[0].node), lists[0].node  # type: ignore[arg-type, assignment]
    if not isinstance(node, cst.List) or len(node.elements) != 1:
        return None, None
    return condition, spell(draft, wrap, Value(value.module, node.elements[0].value))
