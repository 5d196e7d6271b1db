"""no_sync becomes a small context manager that sets FSDP2's gradient synchronisation flag.

What: `model.no_sync()` becomes `no_sync(model)`, a function written into the file that calls
`set_requires_gradient_sync(False)` and, on the way out, `set_requires_gradient_sync(True)`. The reference
`model.no_sync` (without a call) becomes `partial(no_sync, model)`.

Why: FSDP2 modules have no no_sync. The flag must be down in the backward of all micro-steps but the last, and up again
for the last: forgotten, gradients stay None and nothing raises.

Before::

    with model.no_sync() if accumulate else nullcontext():
        loss.backward()

After::

    with no_sync(model) if accumulate else nullcontext():
        loss.backward()

In numbers: equal in fp32. With mixed precision FSDP1 accumulated in param_dtype (bf16), FSDP2 accumulates in
reduce_dtype: better, and not the same (6.5e-4 of the loss after 6 steps of 4 micro-batches).

Known limits: FSDP1 with SHARD_GRAD_OP kept parameters gathered after such a backward;
`set_reshard_after_backward(False)` would.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..wraps import Wrap

SOURCES = ("fsdp1", "ddp", "deepspeed")

HELPER = '''@CONTEXTMANAGER
def no_sync(model):
    """Let gradients accumulate on each rank: the reduction waits for the first backward outside."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)'''


def rewrite(draft: Draft) -> None:
    """Rewrite calls and references of the method."""
    for node in draft.module.every(cst.Attribute):
        if node.attr.value != "no_sync" or draft.module.skips(node):
            continue
        wraps = draft.wraps_of(node.value, *SOURCES)
        if not wraps:
            continue
        name = helper(draft)
        parent = draft.module.parent(node)
        if isinstance(parent, cst.Call) and parent.func is node:
            draft.replace(parent, f"{name}(", *draft.module.quote(node.value), ")")
        else:
            partial = draft.need("functools", "partial")
            draft.replace(node, f"{partial}({name}, ", *draft.module.quote(node.value), ")")
        if any(_low_precision(wrap) for wrap in wraps):
            draft.note(node, Grade.NUMERICS, "gradients accumulate in reduce_dtype; FSDP1 accumulated in param_dtype")
        else:
            draft.note(node, Grade.EXACT, "no_sync sets the gradient synchronisation flag")


def helper(draft: Draft) -> str:
    """Have the context manager written into the file; its name."""
    if "no_sync" not in draft.helpers:
        decorator = draft.need("contextlib", "contextmanager")
        draft.helpers["no_sync"] = HELPER.replace("CONTEXTMANAGER", decorator)
    return "no_sync"


def _low_precision(wrap: Wrap) -> bool:
    return wrap.text("mixed_precision") not in ("", "None")
