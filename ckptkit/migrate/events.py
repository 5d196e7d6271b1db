"""What a statement does when it runs, calls followed into the functions of the program: makes an optimizer, shards a
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import libcst as cst

from .draft import Draft
from .flow import CALL, CLASS, FUNCTION
from .module import Module

Test = Callable[[Draft, Module, cst.Call], bool]
_DEPTH = 4
_OPTIMIZERS = ("torch.optim.", "bitsandbytes.optim.", "transformers.optimization.", "apex.optimizers.", "lion_pytorch.")
_NO_OPTIMIZERS = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a statement does; `models` are the texts of the models it does it to, as the statement names
    them.
    """

    models: frozenset[str]
    on_object: bool = False  # a method call: the models may be attributes of the object


def makes_optimizer(draft: Draft, line: cst.CSTNode) -> list[Event]:
    """The optimizers that running a line makes from parameters."""
    found = []
    for call in _calls(draft.module, line):
        if _optimizer_class(draft, draft.module, call):
            found.append(Event(frozenset(_models(draft, call))))
        elif inside(draft, draft.module, call, _optimizer_class, _DEPTH):
            if inside(draft, draft.module, call, _is_wrap, _DEPTH):
                continue  # it shards too: the order is the called function's matter
            found.append(Event(frozenset(_models(draft, call)), on_object=isinstance(call.func, cst.Attribute)))
    return found


def shards(draft: Draft, line: cst.CSTNode) -> list[Event]:
    """The models that running a line shards."""
    found = []
    for call in _calls(draft.module, line):
        wrap = next((w for w in draft.all_wraps if w.call is call and not w.plan.refused), None)
        if wrap is not None:
            subject = wrap.subject
            names = {draft.code(subject.node)} if subject is not None and subject.module is draft.module else set()
            found.append(Event(frozenset(names | _targets(draft, call))))
        elif inside(draft, draft.module, call, _is_wrap, _DEPTH):
            models = frozenset(_models(draft, call) | _targets(draft, call))
            found.append(Event(models, on_object=isinstance(call.func, cst.Attribute)))
    return found


def _calls(module: Module, line: cst.CSTNode) -> Iterator[cst.Call]:
    """The calls of a line, without those in functions and classes that it only defines."""
    if isinstance(line, (cst.FunctionDef, cst.ClassDef)):
        return
    outer = module.function(line)
    for call in module.inside(line, cst.Call):
        if module.function(call) is outer:
            yield call


def _optimizer_class(draft: Draft, module: Module, call: cst.Call) -> bool:
    for origin in draft.flow.origins(module, call.func):
        if origin.name.startswith(_OPTIMIZERS) and not origin.name.startswith(_NO_OPTIMIZERS):
            return origin.name.rpartition(".")[2][:1].isupper()
        if origin.kind == CLASS and isinstance(origin.node, cst.ClassDef):
            bases = {n for b in origin.node.bases for n in draft.flow.names(origin.module, b.value)}
            if any(name.startswith("torch.optim.") for name in bases):
                return True
    return False


def _is_wrap(draft: Draft, module: Module, call: cst.Call) -> bool:
    return any(w.call is call and not w.plan.refused for w in draft.all_wraps)


def inside(draft: Draft, module: Module, call: cst.Call, test: Test, depth: int) -> bool:
    """Whether a call runs, in functions and constructors of the program, a call that passes a test."""
    if depth == 0:
        return False
    for origin in draft.flow.origins(module, call.func):
        body: cst.CSTNode | None = None
        if origin.kind == FUNCTION:
            body = origin.node
        elif origin.kind == CLASS and isinstance(origin.node, cst.ClassDef):
            members = (m for m in origin.node.body.body if isinstance(m, cst.FunctionDef))
            body = next((m for m in members if m.name.value == "__init__"), None)
        if body is None:
            continue
        for inner in origin.module.inside(body, cst.Call):
            if origin.module.function(inner) is body and (
                test(draft, origin.module, inner) or inside(draft, origin.module, inner, test, depth - 1)
            ):
                return True
    return False


def _models(draft: Draft, call: cst.Call) -> set[str]:
    """Texts of what a call is given that may be a model: names and attributes, `x` of `x.parameters()`."""
    found = set()
    for node in draft.module.inside(call, cst.Name, cst.Attribute):
        if draft.module.within(node, call.func):
            continue
        parent = draft.module.parent(node)
        if isinstance(parent, cst.Attribute) and parent.attr is node:
            continue
        found.add(draft.code(node))
    if isinstance(call.func, cst.Attribute) and not found:
        return set()  # a method of an object that holds its model
    return found


def _targets(draft: Draft, call: cst.Call) -> set[str]:
    statement = draft.module.statement(call)
    if isinstance(statement, cst.Assign) and any(o.kind == CALL for o in draft.origins(call)):
        return {draft.code(t.target) for t in statement.targets}
    return set()
