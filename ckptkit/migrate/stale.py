"""The check that nothing keeps parameters from before the sharding: an optimizer of them would train what nothing uses,
unsaid.
"""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .events import is_optimizer
from .syntax import argument_of, assigned_names
from .wraps import Wrap

RULE = "optimizer-order"
_REASON = "make the optimizer after the model is sharded: the parameters that it holds here will not be trained"
_TAKEN = "these parameters are taken before the model is sharded, which replaces them: take them afterwards"
_UNSEEN = (
    "if these are parameters of the model that is sharded below, make the optimizer behind it: else they stay as is"
)
_KEEPERS = tuple(f"builtins.{name}" for name in ("list", "tuple", "set", "dict", "filter", "sorted", "enumerate"))
_DEPTH = 4


def report(draft: Draft) -> None:
    """Leave a TODO at every optimizer that takes a wrapped model's parameters before the wrap and was not moved, and
    where such parameters are stored.
    """
    wraps = [wrap for wrap in draft.all_wraps if not wrap.plan.refused and wrap.subject is not None]
    for call in draft.module.every(cst.Call) if wraps else ():
        if draft.module.skips(call):
            continue
        if is_optimizer(draft, draft.module, call):
            rebound = any(id(call) in wrap.facts.get("rebound", ()) for wrap in wraps)  # type: ignore[operator]
            takes = owners(draft, call)
            if rebound:
                continue
            if any(precedes(draft, call, owner, wrap) for owner in takes for wrap in wraps):
                draft.todo(call, _REASON, RULE)
            elif not takes and any(_stands_above(draft, call, wrap) for wrap in wraps):
                draft.todo(call, _UNSEEN, RULE)
        elif (target := _stored(draft, call)) is not None:
            owner = call.func.value  # type: ignore[attr-defined]
            if any(precedes(draft, call, owner, w) and _outlives(draft, target, w) for w in wraps):
                draft.todo(call, _TAKEN, RULE)


def _stands_above(draft: Draft, call: cst.Call, wrap: Wrap) -> bool:
    """Whether a call runs before a wrap of its own function, and stays there."""
    module = draft.module
    here = module is wrap.module and module.function(call) is module.function(wrap.call)
    moved = any(module.within(call, line) for line in draft.deleted)
    return here and not moved and module.span(call).stop <= module.span(wrap.call).start


def _stored(draft: Draft, call: cst.Call) -> cst.BaseExpression | None:
    """The name or attribute that keeps what `x.parameters()` gives, in a list or by itself; None where nothing does."""
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value not in ("parameters", "named_parameters"):
        return None
    at: cst.CSTNode = call
    for holder in draft.module.ancestors(call):
        if isinstance(holder, cst.Assign):
            targets = assigned_names(holder)
            return targets[0] if len(targets) == 1 else None
        if isinstance(holder, cst.Call) and draft.name(holder.func) not in _KEEPERS:
            return None
        if isinstance(holder, cst.BaseSimpleComp) and not _keeps(holder.elt, holder.for_in.target):
            return None
        if isinstance(holder, cst.CompFor) and holder.iter is not at:
            return None
        kinds = (cst.Arg, cst.Call, cst.BaseSimpleComp, cst.CompFor, cst.BaseList, cst.Tuple, cst.Dict)
        if not isinstance(holder, (*kinds, cst.BaseElement, cst.BaseDictElement)):
            return None
        at = holder
    return None


def _keeps(element: cst.BaseExpression, target: cst.BaseExpression) -> bool:
    """Whether a comprehension gives its items themselves: `p for p in`, `p for name, p in`, not `name for name, p`."""
    items = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else [target]
    return isinstance(element, cst.Name) and isinstance(items[-1], cst.Name) and element.value == items[-1].value


def _outlives(draft: Draft, target: cst.BaseExpression, wrap: Wrap) -> bool:
    """Whether what is stored in a target may be read when a wrap has run."""
    module = draft.module
    if not isinstance(target, cst.Name):
        return True
    if module is not wrap.module or module.function(target) is not module.function(wrap.call):
        return False
    function = module.function(wrap.call) or module.tree
    reads = (n for n in module.inside(function, cst.Name) if n.value == target.value and n is not target)
    return any(module.span(name).start > module.span(wrap.call).stop for name in reads)


def owners(draft: Draft, call: cst.Call) -> list[cst.BaseExpression]:
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


def precedes(draft: Draft, call: cst.Call, owner: cst.BaseExpression, wrap: Wrap) -> bool:
    """Whether a call uses a model (`owner`) that a wrap shards, where the wrap has not run yet."""
    subject = wrap.subject
    assert subject is not None
    if draft.wraps_of(owner):
        return False
    mine = {id(o.node) for o in draft.origins(owner)}
    wrapped = {id(o.node) for o in draft.flow.origins(subject.module, subject.node)}
    same_name = (
        subject.module is draft.module
        and draft.code(subject.node) == draft.code(owner)
        and draft.module.function(wrap.call) is draft.module.function(call)
    )
    if not mine and not same_name:
        return _handed_in(draft, call, owner, wrap)
    if not (mine & wrapped or (same_name and not mine)):
        return False
    # Instances are told apart by their class: those of two scripts that share nothing else are two models.
    together = _reach(draft, call, _DEPTH) & _reach(draft.peers[id(wrap.module)], wrap.call, _DEPTH)
    return bool(together) and not _settled(draft, call, wrap, _DEPTH)


def _handed_in(draft: Draft, call: cst.Call, owner: cst.BaseExpression, wrap: Wrap) -> bool:
    """Whether a parameter of a function is given such a model, by a name that its caller wraps further down."""
    function = draft.module.function(call)
    if not isinstance(owner, cst.Name) or not isinstance(function, cst.FunctionDef):
        return False
    method = draft.flow.owner(draft.module, function) is not None
    names = [p.name.value for p in (*function.params.posonly_params, *function.params.params)][1 if method else 0 :]
    for where, outer in draft.flow.callers(draft.module, function):
        peer, argument = draft.peers.get(id(where)), argument_of(outer, names, owner.value)
        if peer is not None and argument is not None and where is wrap.module and precedes(peer, outer, argument, wrap):
            return True
    return False


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
