"""ShardedGradScaler becomes torch.amp.GradScaler.

What: the class is replaced and `process_group` dropped; positional arguments become keywords.

Why: with FSDP2 gradients are DTensors, and the plain GradScaler sees an inf on any rank's shard on all ranks.

Before::

    scaler = ShardedGradScaler(init_scale=2.0**14)

After::

    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)

In numbers: equal; defaults of the two classes are the same.

Known limits: the order of positional arguments differs between the classes, which is why they become keywords.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..uses import is_annotation, is_check

SOURCES = ("fsdp1",)
SCALER = "torch.distributed.fsdp.ShardedGradScaler"
_PARAMETERS = ("device", "init_scale", "backoff_factor", "growth_factor", "growth_interval", "enabled", "process_group")


def rewrite(draft: Draft) -> None:
    """Rewrite every construction, annotation and isinstance check."""
    for node in draft.module.every(cst.Name, cst.Attribute):
        if isinstance(draft.module.parent(node), cst.Attribute) or draft.name(node) != SCALER:
            continue
        holder = draft.module.parent(node)
        names_it = isinstance(holder, cst.Assign) and holder.value is node  # `Scaler = ShardedGradScaler`
        if not draft.module.skips(node) and (names_it or is_annotation(draft, node) or is_check(draft, node)):
            draft.replace(node, f"{draft.need_module('torch')}.amp.GradScaler")
            draft.note(node, Grade.EXACT, "the type of the scaler is torch.amp.GradScaler")
    for call in draft.calls(SCALER):
        if any(argument.star for argument in call.args):
            draft.todo(call, "ShardedGradScaler with unpacked arguments: use torch.amp.GradScaler")
            continue
        torch = draft.need_module("torch")
        device: tuple = ('"cuda"',)
        rest: list = []
        for position, argument in enumerate(call.args):
            name = argument.keyword.value if argument.keyword is not None else _PARAMETERS[position]
            if name == "device":
                device = draft.module.quote(argument.value)
            elif name != "process_group":
                rest += [f", {name}=", *draft.module.quote(argument.value)]
        draft.replace(call, f"{torch}.amp.GradScaler(", *device, *rest, ")")
        draft.note(call, Grade.EXACT, "ShardedGradScaler becomes torch.amp.GradScaler")
