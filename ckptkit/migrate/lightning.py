"""Fact: which strategy Lightning's Trainer or Fabric is given, and which LightningModule it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from .draft import Draft
from .module import Module
from .origin import INSTANCE
from .syntax import argument_of

_PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")


@dataclass(frozen=True, slots=True)
class Fitted:
    """The class that is trained, its methods by name, and the draft of its module."""

    draft: Draft
    owner: cst.ClassDef
    methods: dict[str, cst.FunctionDef]


def is_from_lightning(name: str, what: str) -> bool:
    """Whether a dotted name is Lightning's `what`, from whichever of its packages and modules."""
    return name.startswith(_PACKAGES) and name.rpartition(".")[2] == what


def strategies(draft: Draft) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
    """Every Trainer and Fabric of the module that is given FSDP1, with the expression that makes the strategy."""
    for call in draft.module.every(cst.Call):
        name = draft.flow.called(draft.module, call)
        if not is_from_lightning(name, "Trainer") and not is_from_lightning(name, "Fabric"):
            continue
        given = argument_of(call, [], "strategy")
        if given is None:
            continue
        for origin in draft.origins(given):
            if origin.module is not draft.module:
                continue
            node = origin.node
            made = isinstance(node, cst.Call) and is_from_lightning(origin.name, "FSDPStrategy")
            named = isinstance(node, cst.SimpleString) and node.evaluated_value in ("fsdp", "fsdp_cpu_offload")
            if (made or named) and isinstance(node, cst.BaseExpression):
                yield call, node


def fitted_by(draft: Draft, trainer: cst.Call, names: tuple[str, ...]) -> Fitted | str:
    """The LightningModule that a Trainer fits, or why it is not known or cannot take a `configure_model`.

    `names` are classes that must be known in its module. Reasons start with `?`.
    """
    known = [(m, c) for m in draft.flow.program for c in m.every(cst.ClassDef) if _is_module(draft, m, c)]
    models: list[cst.CSTNode] = []
    for call in draft.module.every(cst.Call):
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in ("fit", "validate", "test") or not call.args:
            continue
        if any(origin.node is trainer for origin in draft.origins(func.value)):
            models += [o.node for o in draft.origins(call.args[0].value) if o.kind == INSTANCE]
    chosen = [(m, c) for m, c in known if any(_makes(draft, node, c) for node in models)] or known
    if len(chosen) != 1:
        return f"?{len(chosen)} LightningModules may be meant"
    module, owner = chosen[0]
    methods = {one.name.value: one for one in owner.body.body if isinstance(one, cst.FunctionDef)}
    if "configure_model" in methods:
        return f"?{owner.name.value} has a configure_model: shard its layers there, then the module itself"
    if missing := [name for name in names if name not in _bound(module)]:
        return f"?{', '.join(missing)} is not known in the module of {owner.name.value}"
    return Fitted(draft.peers[id(module)], owner, methods)


def _is_module(draft: Draft, module: Module, owner: cst.ClassDef) -> bool:
    return any(is_from_lightning(draft.flow.name(module, base.value), "LightningModule") for base in owner.bases)


def _makes(draft: Draft, node: cst.CSTNode, owner: cst.ClassDef) -> bool:
    if not isinstance(node, cst.Call):
        return False
    return any(o.node is owner for where in draft.flow.program for o in draft.flow.origins(where, node.func))


def _bound(module: Module) -> set[str]:
    """The names that classes and imports bind at module level."""
    found: set[str] = set()
    for line in module.tree.body:
        if isinstance(line, cst.ClassDef):
            found.add(line.name.value)
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(small, (cst.ImportFrom, cst.Import)) and not isinstance(small.names, cst.ImportStar):
                for alias in small.names:
                    bound = alias.asname.name if alias.asname else alias.name
                    found.add(bound.value if isinstance(bound, cst.Name) else "")
    return found
