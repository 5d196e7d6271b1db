"""register_comm_hook with a bf16 or fp16 compression hook becomes reduce_dtype of the mixed-precision policy.

What: `model.register_comm_hook(state, bf16_compress_hook)` goes, and every `fully_shard` call gets `reduce_dtype`.

Before::

    model = FSDP(model)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)

After::

    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))

In numbers: the same reduction dtype; where FSDP1 divided before the reduction and FSDP2 averages, the last bit of
bf16 may differ.

Known limits: other hooks (PowerSGD, the program's own) are left with a TODO: `set_custom_reduce_scatter`,
`set_all_reduce_hook`.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..syntax import argument_of
from ..wraps import Wrap

SOURCES = ("fsdp1", "ddp")
_DTYPES = {"bf16_compress_hook": "bfloat16", "fp16_compress_hook": "float16"}


def plan(draft: Draft, wrap: Wrap) -> None:
    """Put the hook's dtype into the policies."""
    for peer in draft.peers.values():
        for call in peer.module.every(cst.Call):
            if not _is_hook(call) or not any(o.node is wrap.call for o in peer.origins(call.func.value)):  # type: ignore[attr-defined]
                continue
            dtype = _dtype(peer, call)
            if dtype is None or "mixed_precision" in wrap.args:
                continue
            policy = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
            torch = draft.need_module("torch")
            wrap.plan.kwargs["mp_policy"] = (f"{policy}(reduce_dtype={torch}.{dtype})",)


def rewrite(draft: Draft) -> None:
    """Remove the hooks that were carried over."""
    for call, wraps in draft.methods("register_comm_hook", sources=("fsdp1", "ddp")):
        if _dtype(draft, call) is None or any("mixed_precision" in wrap.args for wrap in wraps):
            draft.todo(call, "a communication hook: use set_custom_reduce_scatter or set_all_reduce_hook")
        else:
            draft.delete(call)
            draft.note(call, Grade.NUMERICS, "the compression hook becomes reduce_dtype: last bits may differ")


def _is_hook(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "register_comm_hook"


def _dtype(draft: Draft, call: cst.Call) -> str | None:
    hook = argument_of(call, ["state", "hook"], "hook")
    return _DTYPES.get(draft.name(hook).rpartition(".")[2]) if hook is not None else None
