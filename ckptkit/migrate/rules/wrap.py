"""FSDP(model, ...) becomes fully_shard(model, ...), in place.

What: every call of FullyShardedDataParallel, in whatever form: an assignment, an attribute, nested in another call,
through `partial(FSDP, ...)`, with `**kwargs` from a known dict, as a branch of a conditional expression.

Why: `fully_shard` shards the module that it is given and returns it; there is no wrapper object. Each submodule that
FSDP1 would have wrapped gets its own call, children before parents, the model itself last.

Before::

    fsdp_model = FSDP(model, auto_wrap_policy=policy)

After::

    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    fsdp_model = model

In numbers: equal. FSDP1 divides gradients before and after the reduction, FSDP2 averages: in fp32 the last bit can
differ when the number of ranks is no power of two (at most 4.8e-7 of the loss on 3 ranks).

Known limits: `type(model) is Cls` is False after `fully_shard` (isinstance holds); `copy.deepcopy(model)` and
`torch.save(model)` of the whole module fail; classes derived from FullyShardedDataParallel, and wraps whose callee or
`**kwargs` are only known at run time, are left with a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..names import FSDP
from ..wraps import Wrap

SOURCES = ("fsdp1",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Refuse what cannot be sharded as it stands; report the rest."""
    subject = wrap.subject
    if subject is None:
        return
    made = {origin.name for origin in draft.flow.origins(subject.module, subject.node)}
    if made and made <= {"torch.nn.ModuleList", "torch.nn.ModuleDict"}:
        wrap.plan.refuse("wrap", "fully_shard takes no ModuleList or ModuleDict: shard its members")
        return
    draft.note(wrap.call, Grade.EXACT, "FullyShardedDataParallel becomes fully_shard, in place")


def rewrite(draft: Draft) -> None:
    """Classes derived from FullyShardedDataParallel are a person's work."""
    for owner in draft.module.every(cst.ClassDef):
        for base in owner.bases:
            if draft.name(base.value) == FSDP and not draft.module.skips(owner):
                draft.todo(
                    owner, f"class {owner.name.value} derives from FullyShardedDataParallel, which has no counterpart"
                )
