"""device_id goes: fully_shard moves the model to the current device, which must be set before.

What: `device_id=...` is removed. Where the program never calls `torch.cuda.set_device`, the call is added. An
explicit CPU device becomes a CPU mesh, because without a mesh `fully_shard` takes the accelerator.

Why: FSDP1 moved parameters and buffers to device_id; `fully_shard` moves them to the device of its mesh, for CUDA the
current device.

Before::

    model = FSDP(model, device_id=local_rank)

After::

    torch.cuda.set_device(local_rank)
    fully_shard(model)

In numbers: equal.

Known limits: a device that is chosen at run time among other than CUDA and CPU is set by the program itself.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..models import device_kind, sets_device
from ..plan import Order
from ..rule import spell
from ..wraps import Wrap

SOURCES = ("fsdp1",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Replace the argument by a set device or a CPU mesh."""
    value = wrap.get("device_id")
    if value is None:
        return
    kind = device_kind(draft, value)
    if kind == "cpu":
        _cpu_mesh(draft, wrap)
        return
    draft.note(wrap.call, Grade.EXACT, "device_id goes: fully_shard uses the current device")
    current = draft.flow.origins(value.module, value.node)
    if sets_device(draft) or any(o.name == "torch.cuda.current_device" for o in current):
        return
    statement = wrap.module.statement(wrap.call)
    if getattr(statement, "value", None) is not wrap.call:
        return  # an inner wrap; the outer one sets the device
    spelled = spell(draft, wrap, value)
    if spelled is None:
        draft.todo(wrap.call, f"call torch.cuda.set_device({wrap.text('device_id')}) before the model is sharded")
        return
    torch = draft.need_module("torch")
    if kind == "either":
        step = draft.module.step()
        wrap.plan.step(
            Order.DEVICE, ("if ", *spelled, '.type == "cuda":'), (f"{step}{torch}.cuda.set_device(", *spelled, ")")
        )
    else:
        wrap.plan.step(Order.DEVICE, (f"{torch}.cuda.set_device(", *spelled, ")"))


def _cpu_mesh(draft: Draft, wrap: Wrap) -> None:
    draft.note(wrap.call, Grade.EXACT, "device_id=cpu becomes a CPU mesh")
    given = wrap.args.get("device_mesh") or wrap.args.get("process_group") or wrap.args.get("sharding_strategy")
    if given is not None and not (isinstance(given.node, cst.Name) and given.node.value == "None"):
        strategy = wrap.args.get("sharding_strategy")
        origins = draft.flow.origins(strategy.module, strategy.node) if strategy is not None else ()
        names = {origin.name.rpartition(".")[2] for origin in origins}
        meshed = not names or not names <= {"FULL_SHARD", "SHARD_GRAD_OP"}
        if meshed or "device_mesh" in wrap.args or "process_group" in wrap.args:
            return  # the rules of these arguments build the mesh
    mesh = draft.need("torch.distributed.device_mesh", "init_device_mesh")
    dist = draft.need_module("torch.distributed", "dist")
    wrap.plan.kwargs["mesh"] = (f'{mesh}("cpu", ({dist}.get_world_size(),))',)
    wrap.plan.shared["mesh"] = ("mesh", "device_mesh")
