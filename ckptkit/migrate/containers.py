"""Origins of what literal tuples, lists and dicts hold, and of what is unpacked from a call or a NamedTuple."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from .module import Module
from .origin import CALL, INSTANCE, NOTHING, Origin, Origins
from .record_fields import field_at

if TYPE_CHECKING:
    from .flow import Flow

DEEPEST = 3  # items of items that are told apart: `x = x[0]` in a loop has no last one


def items(flow: Flow, module: Module, iterable: cst.BaseExpression) -> Origins:
    """Origins of the items of a literal tuple or list."""
    found: Origins = NOTHING
    for origin in flow.origins(module, iterable):
        if isinstance(origin.node, (cst.Tuple, cst.List)):
            for element in origin.node.elements:
                found |= flow.origins(origin.module, element.value)
    return found


def unpacked(flow: Flow, module: Module, value: cst.CSTNode, path: list[int]) -> Origins:
    found = flow.origins(module, value)
    for index in path:
        found = item(flow, found, index)
    return found


def item(flow: Flow, origins: Origins, index: int) -> Origins:
    found: Origins = NOTHING
    for origin in origins:
        node = origin.node
        if isinstance(node, (cst.Tuple, cst.List)):
            if -len(node.elements) <= index < len(node.elements):
                found |= flow.origins(origin.module, node.elements[index].value)
        elif origin.kind == CALL and origin.name.count("[") < DEEPEST:
            found |= {Origin(origin.module, node, CALL, f"{origin.name}[{index}]")}
        elif origin.kind == INSTANCE and isinstance(node, cst.ClassDef):
            found |= field_at(flow, origin.module, node, index)
    return found


def subscript(flow: Flow, module: Module, node: cst.Subscript) -> Origins:
    base = flow.origins(module, node.value)
    if len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
        return NOTHING
    index = node.slice[0].slice.value
    if isinstance(index, cst.Integer):
        return item(flow, base, int(index.value, 0))
    if isinstance(index, cst.SimpleString):
        return entry(flow, base, index.evaluated_value)
    return any_item(flow, base)


def any_item(flow: Flow, origins: Origins) -> Origins:
    """Origins of all that a literal container holds, for a key that only the run knows."""
    found: Origins = NOTHING
    for origin in origins:
        node = origin.node
        if isinstance(node, cst.Dict):
            values = [e.value for e in node.elements if isinstance(e, cst.DictElement)]
        elif isinstance(node, (cst.Tuple, cst.List)):
            values = [e.value for e in node.elements]
        else:
            continue
        for value in values:
            found |= flow.origins(origin.module, value)
    return found


def entry(flow: Flow, origins: Origins, key: str | bytes) -> Origins:
    found: Origins = NOTHING
    for origin in origins:
        if isinstance(origin.node, cst.Dict):
            for element in origin.node.elements:
                known = isinstance(element, cst.DictElement) and isinstance(element.key, cst.SimpleString)
                if known and element.key.evaluated_value == key:  # type: ignore[attr-defined]
                    found |= flow.origins(origin.module, element.value)
    return found


def yielded(flow: Flow, module: Module, call: cst.BaseExpression) -> Origins:
    """What a context manager of the program, a function with a `yield`, binds by `as`."""
    found: Origins = NOTHING
    for origin in flow.origins(module, call.func) if isinstance(call, cst.Call) else ():
        if isinstance(origin.node, cst.FunctionDef):
            for one in origin.module.inside(origin.node, cst.Yield):
                if isinstance(one.value, cst.BaseExpression):
                    found |= flow.origins(origin.module, one.value)
    return found
