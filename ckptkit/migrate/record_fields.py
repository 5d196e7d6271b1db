"""Origins of the fields of dataclasses and NamedTuples: what calls of the class give for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst
from libcst.helpers import get_full_name_for_node

from .module import Module
from .origin import NOTHING, Origins
from .syntax import argument_of

if TYPE_CHECKING:
    from .flow import Flow


def fields(owner: cst.ClassDef) -> list[str]:
    """The fields of a dataclass or NamedTuple in their order; none for a class that writes its own `__init__`."""
    lines = owner.body.body
    if any(isinstance(line, cst.FunctionDef) and line.name.value == "__init__" for line in lines):
        return []
    marks = [d.decorator.func if isinstance(d.decorator, cst.Call) else d.decorator for d in owner.decorators]
    marks += [base.value for base in owner.bases]
    names = {(get_full_name_for_node(mark) or "").rpartition(".")[2] for mark in marks}
    if not names & {"dataclass", "NamedTuple"}:
        return []
    found = []
    for line in lines:
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                found.append(small.target.value)
    return found


def given(flow: Flow, owner: cst.ClassDef, name: str) -> Origins:
    """Origins of the arguments that calls of a class give for a field."""
    order = fields(owner)
    found: Origins = NOTHING
    if name not in order:
        return found
    for where, call in flow.calls_named(owner.name.value):
        if any(origin.node is owner for origin in flow.origins(where, call.func)):
            argument = argument_of(call, order, name)
            if argument is not None:
                found |= flow.origins(where, argument)
    return found


def field_at(flow: Flow, module: Module, owner: cst.ClassDef, index: int) -> Origins:
    """Origins of a field of a NamedTuple by its place."""
    order = fields(owner)
    return flow.member(module, owner, order[index]) if -len(order) <= index < len(order) else NOTHING
