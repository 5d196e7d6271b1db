"""The check that no optimizer keeps parameters from before the sharding: it would train what nothing uses, unsaid."""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .events import is_optimizer
from .wraps import Wrap

RULE = "optimizer-order"
_REASON = "make the optimizer after the model is sharded: the parameters that it holds here will not be trained"
_DEPTH = 4


def report(draft: Draft) -> None:
    """Leave a TODO at every optimizer that takes a wrapped model's parameters before the wrap and was not moved."""
    wraps = [wrap for wrap in draft.all_wraps if not wrap.plan.refused and wrap.subject is not None]
    for call in draft.module.every(cst.Call) if wraps else ():
        if draft.module.skips(call) or not is_optimizer(draft, draft.module, call):
            continue
        for owner in _owners(draft, call):
            if draft.wraps_of(owner):
                continue
            if any(_before(draft, call, owner, wrap) for wrap in wraps):
                draft.todo(call, _REASON, RULE)
                break


def _owners(draft: Draft, call: cst.Call) -> list[cst.BaseExpression]:
    """`x` of each `x.parameters()` in an optimizer's arguments, and of `x.configure_optimizers()`."""
    found = [
        inner.func.value
        for inner in draft.module.inside(call, cst.Call)
        if isinstance(inner.func, cst.Attribute) and inner.func.attr.value in ("parameters", "named_parameters")
    ]
    if isinstance(call.func, cst.Attribute) and not draft.origins(call.func):
        found.append(call.func.value)
    return found or _takers(draft, draft.module.function(call))


def _takers(draft: Draft, function: cst.CSTNode | None) -> list[cst.BaseExpression]:
    """`x` of each `x.parameters()` in a function, for an optimizer of lists that it has made of them."""
    return [
        call.func.value
        for call in draft.module.every(cst.Call)
        if isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("parameters", "named_parameters")
        and draft.module.function(call) is function
    ]


def _reach(draft: Draft, node: cst.CSTNode, depth: int) -> set[int]:
    """The modules that run a node: its own, and those from which its function is called."""
    found = {id(draft.module)}
    function = draft.module.function(node)
    if isinstance(function, cst.FunctionDef) and depth:
        for where, outer in draft.flow.callers(draft.module, function):
            peer = draft.peers.get(id(where))
            if peer is not None:
                found |= _reach(peer, outer, depth - 1)
    return found


def _before(draft: Draft, call: cst.Call, owner: cst.BaseExpression, wrap: Wrap) -> bool:
    """Whether an optimizer takes the parameters of a wrap's module where the wrap has not run yet."""
    subject = wrap.subject
    assert subject is not None
    mine = {id(o.node) for o in draft.origins(owner)}
    wrapped = {id(o.node) for o in draft.flow.origins(subject.module, subject.node)}
    same_name = (
        subject.module is draft.module
        and draft.code(subject.node) == draft.code(owner)
        and draft.module.function(wrap.call) is draft.module.function(call)
    )
    if not (mine & wrapped or (same_name and not mine)):
        return False
    # Instances are told apart by their class: those of two scripts that share nothing else are two models.
    together = _reach(draft, call, _DEPTH) & _reach(draft.peers[id(wrap.module)], wrap.call, _DEPTH)
    return bool(together) and not _settled(draft, call, wrap, _DEPTH)


def _settled(draft: Draft, call: cst.Call, wrap: Wrap, depth: int) -> bool:
    """Whether a call runs behind a wrap, or stands in a statement that was moved there; else whether its callers do."""
    module = draft.module
    if any(module.within(call, line) for line in draft.deleted):
        return True
    function = module.function(call)
    if module is wrap.module and function is module.function(wrap.call):
        return module.span(call).start > module.span(wrap.call).stop
    if not isinstance(function, cst.FunctionDef) or depth == 0:
        return False
    callers = draft.flow.callers(module, function)
    peers = [(draft.peers.get(id(where)), outer) for where, outer in callers]
    return bool(peers) and all(peer is not None and _settled(peer, outer, wrap, depth - 1) for peer, outer in peers)
