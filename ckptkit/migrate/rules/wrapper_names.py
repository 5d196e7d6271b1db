"""FSDP_PREFIX and the other constants of FSDP1's wrapper names go: parameters of a sharded model have clean names.

What: `name.replace(FSDP_PREFIX, "")` becomes `name`; elsewhere the constants (FSDP_PREFIX, FSDP_WRAPPED_MODULE) become
the texts that they stand for. `clean_tensor_name(name)` becomes the replacement of the checkpoint wrapper's prefix,
which is the only one left.

Why: they are private to FSDP1, and `fully_shard` puts no wrapper around modules: no name holds them any more.

Before::

    names = [name.replace(FSDP_PREFIX, "") for name, _ in model.named_parameters()]

After::

    names = [name for name, _ in model.named_parameters()]

In numbers: equal.

Known limits: texts such as "_fsdp_wrapped_module." that a program spells out itself stay; replacing what is not there
does no harm. Values read in torch 2.13 torch/distributed/fsdp/_common_utils.py.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade

SOURCES = ("fsdp1",)
_FSDP = "torch.distributed.fsdp."
_TEXTS = {
    _FSDP + "FSDP_PREFIX": "_fsdp_wrapped_module.",
    _FSDP + "FSDP_WRAPPED_MODULE": "_fsdp_wrapped_module",
}
_CLEAN = _FSDP + "clean_tensor_name"
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def rewrite(draft: Draft) -> None:
    """Replace every constant, and the call that cleans names."""
    module = draft.module
    replaced: list[cst.CSTNode] = []
    for node in module.every(cst.Name, cst.Attribute):
        text = _TEXTS.get(draft.name(node), "")
        parent = module.parent(node)
        if not text or module.skips(node) or module.up(node, cst.Import, cst.ImportFrom) is not None:
            continue
        if isinstance(parent, cst.Attribute) and (parent.attr is node or draft.name(parent) in _TEXTS):
            continue
        if _is_label(parent, node) or any(module.within(node, done) for done in replaced):
            continue
        removal = _removal(draft, node)
        if removal is not None:
            draft.replace(removal, *module.quote(removal.func.value))  # type: ignore[attr-defined]
            replaced.append(removal)
        else:
            draft.replace(node, f'"{text}"')
        draft.note(node, Grade.EXACT, "names of a sharded model have no wrapper prefix")
    for call in draft.calls(_CLEAN):
        if len(call.args) == 1:
            draft.replace(call, *module.quote(call.args[0].value), f'.replace("{_CHECKPOINT_PREFIX}", "")')
            draft.note(call, Grade.EXACT, "of the prefixes that clean_tensor_name took away one is left")


def _is_label(parent: cst.CSTNode | None, node: cst.CSTNode) -> bool:
    """Whether a name is bound here or is the keyword of an argument."""
    if isinstance(parent, cst.Arg):
        return parent.keyword is node
    return (
        isinstance(parent, (cst.AssignTarget, cst.AnnAssign, cst.Param)) and getattr(parent, "value", None) is not node
    )


def _removal(draft: Draft, node: cst.CSTNode) -> cst.Call | None:
    """The call `text.replace(node, "")` of which a constant is the first argument."""
    call = draft.module.up(node, cst.Call)
    if call is None or len(call.args) != 2 or call.args[0].value is not node:
        return None
    blank = call.args[1].value
    replaces = isinstance(call.func, cst.Attribute) and call.func.attr.value == "replace"
    empty = isinstance(blank, cst.SimpleString) and blank.evaluated_value == ""
    return call if replaces and empty else None
