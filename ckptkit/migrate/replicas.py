"""Facts about models that DDP replicates: which expressions hold them, also the module under its old name, and which
optimizers step them.
"""

from __future__ import annotations

import re

import libcst as cst

from .draft import Draft
from .events import is_optimizer
from .origin import CALL
from .wraps import Wrap

_WALKS = ("parameters", "named_parameters", "modules", "named_modules", "children", "named_children")
_ACCELERATORS = re.compile(r"(?<![a-z])(?:cuda|nccl|xpu|npu|hpu|mps)(?![a-z])|accelerator")


def replicated(draft: Draft, node: cst.BaseExpression) -> list[Wrap]:
    """The DDP wraps whose model an expression holds: the wrapper, or the module itself below the wrapping call.

    `fully_shard` works in place, so what `net` meant above `model = DDP(net)` is a sharded model below it.
    """
    found = draft.wraps_of(node, "ddp")
    if found or not isinstance(node, (cst.Name, cst.Attribute)):
        return found
    module, text = draft.module, draft.code(node)
    for wrap in draft.wraps:
        subject = wrap.subject
        below = module.span(node).start > module.span(wrap.call).stop
        same = subject is not None and isinstance(subject.node, (cst.Name, cst.Attribute))
        if (
            same
            and below
            and wrap.source == "ddp"
            and not wrap.plan.refused
            and draft.code(subject.node) == text  # type: ignore[union-attr]
            and module.function(wrap.call) is module.function(node)
            and draft.origins(node) == draft.origins(subject.node)  # type: ignore[union-attr]
        ):
            found.append(wrap)
    return found


def holding(draft: Draft, node: cst.BaseExpression, *sources: str) -> list[Wrap]:
    """The wraps of some sources whose model an expression may hold, also under the name that it had before."""
    return draft.wraps_of(node, *sources) or replicated(draft, node)


def model_near(
    draft: Draft, node: cst.CSTNode, optimizer: cst.BaseExpression | None = None
) -> cst.BaseExpression | None:
    """An expression for a replicated model that is bound where `node` stands: the nearest use above it, else below.

    Of several models it is the one whose parameters `optimizer` was made from, by its name or by its wrap.
    """
    module = draft.module
    function, at = module.function(node), module.span(node).start
    uses = [
        n
        for n in module.every(cst.Name, cst.Attribute)
        if module.function(n) is function and _plain(draft, n) and draft.wraps_of(n, "ddp") and not _is_copy(draft, n)
    ]
    names, wraps = _stepped(draft, optimizer) if optimizer is not None else (set(), set())
    uses = (
        [n for n in uses if draft.code(n) in names]
        or [n for n in uses if wraps & {id(wrap.call) for wrap in draft.wraps_of(n, "ddp")}]
        or uses
    )
    if not uses:
        if function is None or not isinstance(function, cst.FunctionDef):
            return None
        params = [p.name for p in function.params.params]
        models = [name for name in params if draft.wraps_of(name, "ddp") and not _is_copy(draft, name)]
        its = (name for name in models if wraps & {id(wrap.call) for wrap in draft.wraps_of(name, "ddp")})
        given = next(its, models[0] if models else None)
        return given if given is not None else _of_object(draft, function)
    above = [n for n in uses if module.span(n).stop <= at]
    return above[-1] if above else uses[0]


def _stepped(draft: Draft, optimizer: cst.BaseExpression) -> tuple[set[str], set[int]]:
    """The model that an optimizer was made from: its texts there (without `.module`) and the wraps that shard it."""
    names: set[str] = set()
    wraps: set[int] = set()
    for origin in draft.origins(optimizer):
        peer = draft.peers.get(id(origin.module))
        if peer is None or not isinstance(origin.node, cst.Call):
            continue
        for call in peer.module.inside(origin.node, cst.Call):
            if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in _WALKS:
                continue
            owner = call.func.value
            text = peer.code(owner).removesuffix(".module")
            names.add(text)
            wraps |= {id(wrap.call) for wrap in peer.wraps_of(owner, "ddp")}
            subjects = [w for w in draft.all_wraps if w.subject is not None and w.module is peer.module]
            wraps |= {id(w.call) for w in subjects if w.subject and w.module.code(w.subject.node) == text}
    return names, wraps


def _is_copy(draft: Draft, node: cst.BaseExpression) -> bool:
    """Whether an expression may hold a copy of a model: sharded as the model is, but not what its optimizer steps."""
    return any(origin.name == "copy.deepcopy" for origin in draft.origins(node))


def _of_object(draft: Draft, method: cst.FunctionDef) -> cst.BaseExpression | None:
    """`self.model` for a method of a class that keeps a replicated model so, in whichever of its methods."""
    owner = draft.flow.owner(draft.module, method)
    for node in draft.module.inside(owner, cst.Attribute) if owner is not None else ():
        mine = isinstance(node.value, cst.Name) and node.value.value == "self" and _plain(draft, node)
        if mine and draft.wraps_of(node, "ddp") and not _is_copy(draft, node):
            return node
    return None


def _plain(draft: Draft, node: cst.BaseExpression) -> bool:
    """Whether an expression is `name` or `name.name` on its own, without `.module` behind it."""
    parent = draft.module.parent(node)
    if isinstance(parent, cst.Attribute) and parent.attr is node:
        return False
    if isinstance(node, cst.Attribute) and (
        not isinstance(node.value, cst.Name) or node.attr.value in ("module", "_orig_mod")
    ):
        return False
    return not isinstance(parent, (cst.Param, cst.ImportAlias)) and not (
        isinstance(parent, cst.Arg) and parent.keyword is node
    )


def steps_replicas(draft: Draft, optimizer: cst.BaseExpression) -> bool:
    """Whether an expression may hold an optimizer of torch that was made from a replicated model's parameters."""
    origins = draft.origins(optimizer)
    if not origins and _of_a_builder(draft, optimizer):
        return True
    rebound = {node for w in draft.all_wraps if w.source == "ddp" for node in w.facts.get("rebound", ())}  # type: ignore[attr-defined]
    for origin in origins:
        if id(origin.node) in rebound:
            return True
        if origin.kind != CALL or not origin.name.startswith("torch.optim.") or not isinstance(origin.node, cst.Call):
            continue
        if origin.name.startswith(("torch.optim.lr_scheduler", "torch.optim.swa_utils")):
            continue
        peer = draft.peers.get(id(origin.module))
        if peer is None:
            continue
        wraps = [w for w in draft.all_wraps if w.source == "ddp" and not w.plan.refused]
        subjects = {w.module.code(w.subject.node) for w in wraps if w.subject is not None and w.module is peer.module}
        models = {id(o.node) for w in wraps if w.subject for o in draft.flow.origins(w.subject.module, w.subject.node)}
        if _is_given(peer, origin.node):
            return True
        function = peer.module.function(origin.node)
        for call in peer.module.every(cst.Call):
            func = call.func
            if not isinstance(func, cst.Attribute) or func.attr.value not in _WALKS:
                continue
            near = peer.module.within(call, origin.node) or peer.module.function(call) is function
            if not near:
                continue
            is_its_own = any(id(o.node) in models for o in peer.origins(func.value))  # `self` in the model's class
            if is_its_own or peer.wraps_of(func.value, "ddp") or peer.code(func.value) in subjects:
                return True
    return False


def _of_a_builder(draft: Draft, optimizer: cst.BaseExpression) -> bool:
    """Whether a name is given the optimizer that a replicated model, or the model below its wrap, makes of itself."""
    module, code = draft.module, draft.code(optimizer)
    wraps = [w for w in draft.wraps if w.source == "ddp" and not w.plan.refused and w.subject is not None]
    held = {module.code(w.subject.node) for w in wraps if w.subject is not None and w.subject.module is module}
    for assign in module.every(cst.Assign):
        call = assign.value
        if not isinstance(call, cst.Call) or all(draft.code(t.target) != code for t in assign.targets):
            continue
        if not isinstance(call.func, cst.Attribute) or not is_optimizer(draft, module, call):
            continue
        owner = call.func.value
        if draft.code(owner).removesuffix(".module") in held or draft.wraps_of(owner, "ddp"):
            return True
    return False


def _is_given(draft: Draft, call: cst.Call) -> bool:
    """Whether an argument of a call is made from a replicated model: `model.module.groups()`, `no_decay(model)`."""
    for argument in call.args:
        made: list[cst.CSTNode] = [argument.value]
        made += [o.node for o in draft.origins(argument.value) if o.kind == CALL and o.module is draft.module]
        for node in made:
            names = draft.module.inside(node, cst.Name, cst.Attribute)
            if any(_plain(draft, name) and draft.wraps_of(name, "ddp") for name in names):
                return True
    return False


def knows_only_cpu(draft: Draft) -> bool:
    """Whether the program names the gloo backend and no accelerator in any file: it trains on the CPU."""
    texts = [module.text.masked.lower() for module in draft.flow.program]
    return any("gloo" in text for text in texts) and not any(_ACCELERATORS.search(text) for text in texts)
