"""Bucketing and graph arguments of DDP go: FSDP2 reduces by its own groups.

What: bucket_cap_mb, bucket_cap_mb_list, gradient_as_bucket_view, static_graph, check_reduction, batched_grad_copy,
delay_all_reduce_named_params, param_to_hook_all_reduce and skip_all_reduce_unused_params are removed.

Why: DDP reduces gradients in buckets of a size; FSDP2 in the groups that its `fully_shard` calls make.

Before::

    model = DDP(model, gradient_as_bucket_view=True, bucket_cap_mb=50)

After::

    fully_shard(model)

In numbers: equal.

Known limits: parameters that delay_all_reduce_named_params left to a hook of the program's own are reduced by FSDP2
like all others.
"""

from __future__ import annotations

from ..draft import Draft
from ..grade import Grade
from ..wraps import Wrap

SOURCES = ("ddp",)
_SILENT = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "gradient_as_bucket_view",
    "static_graph",
    "check_reduction",
    "batched_grad_copy",
    "skip_all_reduce_unused_params",
)
_HOOKED = ("delay_all_reduce_named_params", "param_to_hook_all_reduce")


def plan(draft: Draft, wrap: Wrap) -> None:
    """Claim the arguments that need no counterpart."""
    gone = [name for name in _SILENT if name in wrap.args]
    for name in gone:
        wrap.get(name)
    if gone:
        draft.note(wrap.call, Grade.EXACT, f"{', '.join(gone)}: FSDP2 reduces in its own groups")
    for name in _HOOKED:
        if wrap.get(name) is not None:
            draft.todo(wrap.call, f"{name}: FSDP2 reduces all parameters; drop the hook that reduced these")
