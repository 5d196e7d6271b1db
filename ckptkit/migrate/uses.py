"""Facts about what an expression is used for: its value is taken, it is what a type is compared with, it annotates."""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .edit import Span
from .plan import Line

WHOLE = '''def whole(norm):
    """A norm as a plain tensor: that of a sharded model is a DTensor."""
    return norm.full_tensor() if isinstance(norm, DTENSOR) else norm'''
CLIP_FUNCTIONS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")


def is_used(draft: Draft, call: cst.Call) -> bool:
    """Whether a call's value is used: it is no statement of its own."""
    return not isinstance(draft.module.parent(call), cst.Expr)


def is_gathered(draft: Draft, call: cst.Call) -> bool:
    """Whether `.full_tensor` is asked of a call's value already."""
    parent = draft.module.parent(call)
    return isinstance(parent, cst.Attribute) and parent.attr.value == "full_tensor"


def requoted(draft: Draft, call: cst.Call) -> Line:
    """The call itself, with all edits inside it, as pieces that may stand in the place of the call."""
    span = draft.module.span(call)
    head = draft.module.span(call.func)
    return (head, Span(head.stop, span.stop))


def norm_of(draft: Draft, call: cst.Call, model: cst.BaseExpression) -> Line:
    """A clipping call with its norm as a plain tensor; by a function that asks, where the model may not be sharded."""
    if not draft.may_be_plain(model):
        return (*requoted(draft, call), ".full_tensor()")
    draft.helpers.setdefault("whole", WHOLE.replace("DTENSOR", draft.need("torch.distributed.tensor", "DTensor")))
    return ("whole(", *requoted(draft, call), ")")


def is_check(draft: Draft, node: cst.CSTNode) -> bool:
    """Whether a reference is what something is compared with: isinstance(x, ..), type(x) is .."""
    module = draft.module
    at = module.parent(node)
    if isinstance(at, cst.Element):
        at = module.parent(module.parent(at) or at)
    if isinstance(at, cst.Arg):
        call = module.parent(at)
        names = ("builtins.isinstance", "builtins.issubclass")
        return isinstance(call, cst.Call) and draft.name(call.func) in names and list(call.args[1:2]) == [at]
    return isinstance(at, cst.ComparisonTarget)


def is_annotation(draft: Draft, node: cst.CSTNode) -> bool:
    """Whether a reference stands in an annotation."""
    return draft.module.up(node, cst.Annotation) is not None
