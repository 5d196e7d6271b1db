"""isinstance(x, FSDP) and annotations become FSDPModule; FSDP.fsdp_modules becomes a loop over the modules.

What: the class in the second argument of isinstance and issubclass, in annotations, in `type(x) is FSDP`, and as an
item of tuples there.

Why: after `fully_shard(model)` the class of the model derives from its old class and from FSDPModule.

Before::

    if isinstance(model, FSDP):
        units = FSDP.fsdp_modules(model)

After::

    if isinstance(model, FSDPModule):
        units = [m for m in model.modules() if isinstance(m, FSDPModule)]

In numbers: equal.

`FSDP.fsdp_modules(model, root_only=True)` is the model itself where it is what was wrapped.

Known limits: a module behind torch.compile is no FSDPModule, though it forwards the methods. Other uses of
`root_only`, and of the class as a value, are left over with a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..names import FSDP
from ..syntax import argument_of
from ..uses import is_annotation, is_check

SOURCES = ("fsdp1",)


def _may_stay(draft: Draft, node: cst.CSTNode) -> bool:
    """Whether what is checked may be the model of a wrap that was left as it is."""
    left = [wrap for wrap in draft.all_wraps if wrap.source == "fsdp1" and wrap.plan.refused]
    call = draft.module.up(node, cst.Call)
    if not left or call is None or not call.args:
        return False
    return not draft.wraps_of(call.args[0].value, "fsdp1")


def rewrite(draft: Draft) -> None:
    """Rewrite checks, annotations and fsdp_modules."""
    module = draft.module
    for node in module.every(cst.Name, cst.Attribute):
        parent = module.parent(node)
        if isinstance(parent, cst.Attribute) or draft.name(node) != FSDP or module.skips(node):
            continue
        if module.up(node, cst.Import, cst.ImportFrom) is None and (
            (is_check(draft, node) and not _may_stay(draft, node)) or is_annotation(draft, node)
        ):
            draft.replace(node, draft.need("torch.distributed.fsdp", "FSDPModule"))
            draft.note(node, Grade.EXACT, "the type of a sharded module is FSDPModule")
    for call in draft.calls(FSDP + ".fsdp_modules"):
        model = argument_of(call, ["module", "root_only"], "module")
        only_root = argument_of(call, ["module", "root_only"], "root_only")
        if model is None:
            continue
        if only_root is not None and draft.code(only_root) != "False":
            _roots(draft, call, model, only_root)
            continue
        kind = draft.need("torch.distributed.fsdp", "FSDPModule")
        unit = draft.throwaway("m", "unit")
        quoted = module.quote(model)
        draft.replace(call, f"[{unit} for {unit} in ", *quoted, f".modules() if isinstance({unit}, {kind})]")
        draft.note(call, Grade.EXACT, "fsdp_modules becomes a loop over the modules")


def _roots(draft: Draft, call: cst.Call, model: cst.BaseExpression, only_root: cst.BaseExpression) -> None:
    if draft.code(only_root) == "True" and draft.wraps_of(model, "fsdp1"):
        draft.replace(call, "[", *draft.module.quote(model), "]")
        draft.note(call, Grade.EXACT, "the root of a wrapped model is the model itself")
    else:
        draft.todo(
            call, "take the outermost FSDPModules of model.modules(): fsdp_modules(root_only=True) answered these"
        )
