"""DDP's broadcast of buffers before each forward is kept by a hook where BatchNorm layers may be.

What: models that may hold BatchNorm get a forward hook, written into the file, that sends rank 0's buffers to all
ranks; `broadcast_buffers` and `forward_sync_buffers` go.

Why: DDP makes rank 0's running statistics those of all ranks before every forward. FSDP2 never touches buffers: each
rank would keep its own, and evaluation and checkpoints depend on the rank. The training loss does not show it.

Before::

    model = DDP(resnet)

After::

    fully_shard(resnet)
    resnet.register_forward_pre_hook(broadcast_buffers)

In numbers: equal.

Known limits: models without BatchNorm in sight keep buffers that nothing changes; for others pass your model to
`broadcast_buffers` too. With SyncBatchNorm all ranks compute equal statistics, and no hook is written; where the
layers are only converted under a condition, it is.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..models import literal, may_have_batch_norm
from ..plan import MODEL, Order
from ..wraps import Wrap

SOURCES = ("ddp",)

HELPER = '''def broadcast_buffers(model, _):
    """Give all ranks the buffers of rank 0, as DDP did before every forward."""
    for buffer in model.buffers():
        DIST.broadcast(buffer, src=0)'''
_SYNC = ("convert_sync_batchnorm", "SyncBatchNorm", "convert_syncbn_model")


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add the hook to the plan."""
    value = wrap.get("broadcast_buffers") or wrap.get("forward_sync_buffers")
    wrap.get("forward_sync_buffers")
    if value is not None and literal(draft, value) is False:
        draft.note(wrap.call, Grade.EXACT, "buffers stay as each rank has them, as they did")
        return
    if _is_synced(draft) or not may_have_batch_norm(draft, wrap):
        return
    dist = draft.need_module("torch.distributed", "dist")
    if "broadcast_buffers" not in draft.helpers:
        draft.helpers["broadcast_buffers"] = HELPER.replace("DIST", dist)
    wrap.plan.step(Order.INIT, f"{MODEL}.register_forward_pre_hook(broadcast_buffers)")
    draft.note(wrap.call, Grade.EXACT, "a hook broadcasts rank 0's buffers (BatchNorm statistics), as DDP did")


def _is_synced(draft: Draft) -> bool:
    """Whether the program makes SyncBatchNorm layers, whatever it is asked."""
    for module in draft.flow.program:
        for call in module.every(cst.Call):
            name = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
            if not isinstance(name, cst.Name) or name.value not in _SYNC:
                continue
            choices = [holder for holder in module.ancestors(call) if isinstance(holder, (cst.If, cst.IfExp))]
            if all("__name__" in module.code(choice.test) for choice in choices):
                return True
    return False
