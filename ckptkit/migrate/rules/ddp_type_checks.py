"""isinstance(model, DDP) becomes isinstance(model, FSDPModule).

What: DDP in isinstance checks, comparisons of types and annotations.

Before::

    if isinstance(model, DistributedDataParallel):
        model = model.module

After::

    if isinstance(model, FSDPModule):
        model = model

In numbers: equal.

Known limits: other uses of the class as a value are left over with a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..names import DDP
from ..uses import is_annotation, is_check

SOURCES = ("ddp",)


def rewrite(draft: Draft) -> None:
    """Rewrite checks and annotations of a program whose models all migrate."""
    module = draft.module
    if any(wrap.plan.refused for wrap in draft.all_wraps if wrap.source == "ddp"):
        return
    for node in module.every(cst.Name, cst.Attribute):
        parent = module.parent(node)
        if isinstance(parent, cst.Attribute) or draft.name(node) != DDP or module.skips(node):
            continue
        if module.up(node, cst.Import, cst.ImportFrom) is None and (
            is_check(draft, node) or is_annotation(draft, node)
        ):
            draft.replace(node, draft.need("torch.distributed.fsdp", "FSDPModule"))
            draft.note(node, Grade.EXACT, "the type of a sharded model is FSDPModule")
