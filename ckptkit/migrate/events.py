"""What a statement does when it runs, calls followed into functions: makes an optimizer, shards a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import libcst as cst

from .draft import Draft
from .module import Module
from .origin import CLASS, FUNCTION
from .syntax import argument_of

Test = Callable[[Draft, Module, cst.Call], bool]
_DEPTH = 4
_OPTIMIZERS = (
    "torch.optim.",
    "bitsandbytes.optim.",
    "transformers.optimization.",
    "apex.optimizers.",
    "lion_pytorch.",
    "deepspeed.ops.",
)
_BUILDERS = re.compile(r"_*(?:configure|create|build|get|make|init|setup|set_up)_optim(?:izer)?s?$", re.IGNORECASE)
_NO_OPTIMIZERS = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a statement does; `models` are the texts of the models it does it to, as it names them."""

    models: frozenset[str]


def makes_optimizer(draft: Draft, line: cst.CSTNode) -> list[Event]:
    """The optimizers that running a line makes, with the models whose parameters they take."""
    found = []
    for call in _calls(draft.module, line):
        models = _models(draft, draft.module, call, is_optimizer, _DEPTH)
        # Where the called function shards too, the order is that function's own matter.
        if models and _models(draft, draft.module, call, _is_wrap, _DEPTH) is None:
            found.append(Event(frozenset(models)))
    return found


def shards(draft: Draft, line: cst.CSTNode) -> list[Event]:
    """The models that running a line shards."""
    found = []
    for call in _calls(draft.module, line):
        models = _models(draft, draft.module, call, _is_wrap, _DEPTH)
        if models is not None:
            found.append(Event(frozenset(models)))
    return found


def inside(draft: Draft, module: Module, call: cst.Call, test: Test, depth: int) -> bool:
    """Whether a call runs, in functions and constructors of the program, a call that passes a test."""
    return depth > 0 and any(
        test(draft, where, inner) or inside(draft, where, inner, test, depth - 1)
        for where, _, inner in _bodies(draft, module, call)
    )


def _models(draft: Draft, module: Module, call: cst.Call, test: Test, depth: int) -> set[str] | None:
    """What a call does it to, in the names of its own scope; None when it does not do it at all."""
    if test(draft, module, call):
        return _subjects(draft, module, call)
    if depth == 0:
        return None
    found: set[str] | None = None
    for where, body, inner in _bodies(draft, module, call):
        names = _models(draft, where, inner, test, depth - 1)
        if names is not None:
            found = (found or set()) | _outside(draft, module, call, where, body, names)
    return found


def _bodies(draft: Draft, module: Module, call: cst.Call) -> Iterator[tuple[Module, cst.FunctionDef, cst.Call]]:
    """The calls in the functions of the program that a call runs."""
    for origin in draft.flow.origins(module, call.func):
        body: cst.CSTNode | None = None
        if origin.kind == FUNCTION:
            body = origin.node
        elif origin.kind == CLASS and isinstance(origin.node, cst.ClassDef):
            members = (m for m in origin.node.body.body if isinstance(m, cst.FunctionDef))
            body = next((m for m in members if m.name.value == "__init__"), None)
        if isinstance(body, cst.FunctionDef):
            for inner in origin.module.inside(body, cst.Call):
                if origin.module.function(inner) is body:
                    yield origin.module, body, inner


def _outside(
    draft: Draft, module: Module, call: cst.Call, where: Module, body: cst.FunctionDef, names: set[str]
) -> set[str]:
    """Names of a function's scope in the names of its caller: parameters by their arguments, `self` by its object."""
    params = [p.name.value for p in (*body.params.posonly_params, *body.params.params)]
    method = draft.flow.owner(where, body) is not None and params[:1] == ["self"]
    found = set()
    for name in names:
        head, dot, tail = name.partition(".")
        if method and head == "self" and isinstance(call.func, cst.Attribute):
            found.add(f"{module.code(call.func.value)}{dot}{tail}")
        elif head in params:
            argument = argument_of(call, params[1 if method else 0 :], head)
            if argument is not None:
                found.add(f"{module.code(argument)}{dot}{tail}")
    return found


def _subjects(draft: Draft, module: Module, call: cst.Call) -> set[str]:
    """The models of a wrap or of an optimizer's parameters, as texts."""
    wrap = next((w for w in draft.all_wraps if w.call is call), None)
    if wrap is not None:
        subject = wrap.subject
        names = {module.code(subject.node)} if subject is not None and subject.module is module else set()
        statement = module.statement(call)
        if isinstance(statement, cst.Assign):
            names |= {module.code(target.target) for target in statement.targets}
        return names
    # `x` of each `x.parameters()` in the call, or in what its arguments are made of in the same function.
    function = module.function(call)
    holder = {module.code(call.func.value)} if isinstance(call.func, cst.Attribute) else set()
    names = holder | {module.code(node) for a in call.args for node in module.inside(a, cst.Name, cst.Attribute)}
    for inner in module.every(cst.Call):
        func = inner.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in ("parameters", "named_parameters", "modules"):
            continue
        if module.within(inner, call) or (module.function(inner) is function and function is not None):
            names.add(module.code(func.value))
    return names


def _calls(module: Module, line: cst.CSTNode) -> Iterator[cst.Call]:
    """The calls of a line, without those in functions and classes that it only defines."""
    if isinstance(line, (cst.FunctionDef, cst.ClassDef)):
        return
    outer = module.function(line)
    for call in module.inside(line, cst.Call):
        if module.function(call) is outer:
            yield call


def is_optimizer(draft: Draft, module: Module, call: cst.Call) -> bool:
    """Whether a call makes an optimizer: a class of torch or the program, or a builder out of sight, by its name."""
    origins = draft.flow.origins(module, call.func)
    last = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
    if not origins and isinstance(last, cst.Name) and _BUILDERS.match(last.value):
        return True
    for origin in origins:
        if origin.name.startswith(_OPTIMIZERS) and not origin.name.startswith(_NO_OPTIMIZERS):
            return origin.name.rpartition(".")[2][:1].isupper()
        if origin.kind == CLASS and isinstance(origin.node, cst.ClassDef):
            bases = {n for b in origin.node.bases for n in draft.flow.names(origin.module, b.value)}
            if any(name.startswith("torch.optim.") for name in bases):
                return True
    return False


def _is_wrap(draft: Draft, module: Module, call: cst.Call) -> bool:
    return any(w.call is call and not w.plan.refused for w in draft.all_wraps)
