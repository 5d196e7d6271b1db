"""Fact: every call that wraps a model (FSDP1, DDP, deepspeed.initialize) with its arguments, partials and dicts
merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from .flow import Flow
from .module import Module
from .names import FSDP, WRAPPERS
from .origin import CALL, NAME
from .plan import ShardPlan
from .syntax import argument_of

WRAP = "torch.distributed.fsdp.wrap"
ENABLE_WRAP = "torch.distributed.fsdp.enable_wrap"


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An argument: an expression and the module in which it is written."""

    module: Module
    node: cst.BaseExpression


@dataclass(slots=True, eq=False)
class Wrap:
    """One wrapping call. `args` are by parameter name, whichever way they were given."""

    source: str
    api: str
    module: Module
    call: cst.Call
    args: dict[str, Value] = field(default_factory=dict)
    unresolved: list[cst.BaseExpression] = field(default_factory=list)  # `**kwargs` that cannot be followed
    carriers: list[Value] = field(default_factory=list)  # dicts and partials whose entries were merged into `args`
    plan: ShardPlan = field(default_factory=ShardPlan)
    facts: dict[str, object] = field(default_factory=dict)  # what rules found out about it, by topic

    @property
    def subject(self) -> Value | None:
        """The model that is wrapped."""
        return self.args.get("module") or self.args.get("model")

    def get(self, name: str) -> Value | None:
        """An argument, marked as dealt with; None when absent or literally `None`."""
        value = self.args.get(name)
        if value is None:
            return None
        self.plan.claimed.add(name)
        if isinstance(value.node, cst.Name) and value.node.value == "None":
            return None
        return value

    def text(self, name: str) -> str:
        """The source of an argument, or an empty string."""
        value = self.args.get(name)
        return value.module.code(value.node) if value else ""


def find_wraps(flow: Flow, module: Module, sources: frozenset[str]) -> list[Wrap]:
    """All wrapping calls of a module for the given sources, inner ones first."""
    found = []
    for call in module.every(cst.Call):
        wrap = _wrap(flow, module, call)
        if wrap is not None and wrap.source in sources and not module.skips(call):
            found.append(wrap)
    return sorted(found, key=lambda wrap: module.span(wrap.call).stop - module.span(wrap.call).start)


def _wrap(flow: Flow, module: Module, call: cst.Call) -> Wrap | None:
    callees = flow.origins(module, call.func)
    if {o.name for o in callees if o.kind == NAME} == {WRAP} and len(callees) == 1:
        return _annotated(flow, module, call)
    names = set()
    partials: list[Value] = []
    for origin in callees:
        if origin.kind == NAME:
            names.add(origin.name)
        elif origin.kind == CALL and origin.name == "functools.partial" and isinstance(origin.node, cst.Call):
            target = flow.name(origin.module, origin.node.args[0].value) if origin.node.args else ""
            names.add(target)
            partials.append(Value(origin.module, origin.node))
        else:
            names.add("")
    known = names & WRAPPERS.keys()
    if not known:
        return None
    name = sorted(known)[-1]
    source, parameters = WRAPPERS[name]
    wrap = Wrap(source, name, module, call)
    if len(names) > 1 or len(partials) > 1:
        wrap.plan.refuse("wrap", "what is called here is only known at run time: " + ", ".join(sorted(names)))
    for partial in partials:
        wrap.carriers.append(partial)
        _merge(flow, wrap, partial.module, partial.node.args[1:], parameters)  # type: ignore[attr-defined]
    given = len([p for p in partials for a in p.node.args[1:] if a.keyword is None])  # type: ignore[attr-defined]
    _merge(flow, wrap, module, call.args, parameters[given:])
    return wrap


def _annotated(flow: Flow, module: Module, call: cst.Call) -> Wrap | None:
    """`wrap(x, **overrides)`: the wrapper class and arguments are those of the `enable_wrap` around it.

    Where none is around it in the text, it is run under one from elsewhere: the only one of the program.
    """
    around = [c for c in _contexts(flow, module) if module.within(call, module.statement(c))]
    context = (module, around[-1]) if around else None
    if context is None:
        every = [(m, c) for m in flow.program for c in _contexts(flow, m)]
        context = every[0] if len(every) == 1 else None
    source, _parameters = WRAPPERS[FSDP]
    wrap = Wrap(source, FSDP, module, call)
    if context is None:
        wrap.plan.refuse("enable-wrap", "wrap() outside of any enable_wrap that is known: shard this module by hand")
        return wrap
    where, enable = context
    wrapper = argument_of(enable, [], "wrapper_cls")
    if wrapper is None or flow.name(where, wrapper) != FSDP:
        return None
    rest = [argument for argument in enable.args if argument.keyword is None or argument.keyword.value != "wrapper_cls"]
    _merge(flow, wrap, where, rest, ())
    _merge(flow, wrap, module, call.args, ("module",))
    return wrap


def _contexts(flow: Flow, module: Module) -> list[cst.Call]:
    return [c for c in module.every(cst.Call) if flow.called(module, c) == ENABLE_WRAP]


def _merge(flow: Flow, wrap: Wrap, module: Module, args: object, parameters: tuple[str, ...]) -> None:
    names = iter(parameters)
    for argument in args:  # type: ignore[attr-defined]
        if argument.star == "**":
            entries = dict_entries(flow, module, argument.value)
            if entries is None:
                wrap.unresolved.append(argument.value)
            else:
                wrap.args.update(entries)
                wrap.carriers.append(Value(module, argument.value))
        elif argument.star:
            wrap.unresolved.append(argument.value)
        elif argument.keyword is not None:
            wrap.args[argument.keyword.value] = Value(module, argument.value)
        else:
            wrap.args[next(names, "?")] = Value(module, argument.value)


def dict_entries(flow: Flow, module: Module, node: cst.BaseExpression) -> dict[str, Value] | None:
    """The entries of a dict that is fully known: a literal or `dict(...)`, with straight-line `d["key"] = value`
    stores.
    """
    origins = flow.origins(module, node)
    if len(origins) != 1:
        return None
    origin = next(iter(origins))
    entries: dict[str, Value] = {}
    if isinstance(origin.node, cst.Dict):
        for element in origin.node.elements:
            if not isinstance(element, cst.DictElement) or not isinstance(element.key, cst.SimpleString):
                return None
            entries[str(element.key.evaluated_value)] = Value(origin.module, element.value)
    elif origin.kind == CALL and origin.name in ("dict", "builtins.dict") and isinstance(origin.node, cst.Call):
        for argument in origin.node.args:
            if argument.keyword is None:
                return None
            entries[argument.keyword.value] = Value(origin.module, argument.value)
    else:
        return None
    home = origin.module
    line = home.line(origin.node)
    for subscript in home.every(cst.Subscript):
        if home.span(subscript).start < home.span(origin.node).stop or not isinstance(subscript.value, cst.Name):
            continue
        if flow.origins(home, subscript.value) != origins:
            continue
        assign = home.up(subscript, cst.Assign)
        is_target = assign is not None and any(t.target is subscript for t in assign.targets)
        key = subscript.slice[0].slice.value if isinstance(subscript.slice[0].slice, cst.Index) else None
        if is_target and home.parent(home.line(subscript)) is home.parent(line) and isinstance(key, cst.SimpleString):
            entries[str(key.evaluated_value)] = Value(home, assign.value)  # type: ignore[union-attr]
        elif is_target:
            return None
    for call in home.every(cst.Call):
        func = call.func
        changes = isinstance(func, cst.Attribute) and func.attr.value in ("update", "pop", "setdefault", "clear")
        holder = func.value if changes else None  # type: ignore[attr-defined]
        if isinstance(holder, cst.Name) and flow.origins(home, holder) == origins:
            return None
    return entries
