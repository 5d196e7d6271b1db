"""The norm that clip_grad_norm_ answers for a sharded model is gathered with full_tensor() where it is used.

What: `.full_tensor()` behind `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` whose value is used. Calls that
are statements of their own stay as they are.

Why: the function clips by the norm over all ranks, and answers it as a DTensor. Formatting that raises TypeError.

Before::

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

After::

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()

In numbers: the norm is summed in another order: 1e-7 relative in fp32.

Known limits: where the parameters come from a list that the rule cannot follow, a used norm gets a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..replicas import replicated
from ..uses import CLIP_FUNCTIONS, is_gathered, is_used, norm_of

SOURCES = ("ddp",)


def rewrite(draft: Draft) -> None:
    """Gather norms that are used."""
    wraps = [w for w in draft.all_wraps if w.source == "ddp" and not w.plan.refused]
    for call in draft.calls(*CLIP_FUNCTIONS) if wraps else ():
        if not is_used(draft, call) or is_gathered(draft, call) or not call.args:
            continue
        owner = _owner(draft, call.args[0].value)
        if owner is None or (not replicated(draft, owner) and _unknown(draft, owner)):
            draft.todo(call, "if these are parameters of a sharded model, the norm is a DTensor: add .full_tensor()")
        elif replicated(draft, owner):
            draft.replace(call, *norm_of(draft, call, owner))
            draft.note(call, Grade.EXACT, "the norm over all ranks is a DTensor and is gathered")


def _owner(draft: Draft, node: cst.BaseExpression) -> cst.BaseExpression | None:
    """`x` of `x.parameters()`, also behind a name that is bound to it (or to a list made of it) in this function."""
    module = draft.module
    calls = [node, *module.inside(node, cst.Call)]
    if isinstance(node, cst.Name):
        for assign in module.every(cst.Assign):
            if module.function(assign) is module.function(node) and any(
                draft.code(t.target) == node.value for t in assign.targets
            ):
                calls += module.inside(assign.value, cst.Call)
    for call in calls:
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value == "parameters":
            return call.func.value
    return None


def _unknown(draft: Draft, owner: cst.BaseExpression) -> bool:
    return not draft.origins(owner)
