"""How the nodes of a tree lie in each other, and the scopes of its names: LibCST's answers, found in fewer walks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import libcst as cst
from libcst import BatchableCSTVisitor, metadata
from libcst.metadata.scope_provider import ScopeVisitor


class Holders:
    """The holder of every node, and which nodes lie within which; nodes are told apart by identity.

    Nodes are numbered in an order in which all that a node holds comes directly after it, so that one comparison of
    numbers says whether one lies within another.
    """

    __slots__ = ("_functions", "_last", "_number", "_parent")

    def __init__(self, tree: cst.Module) -> None:
        self._parent: dict[int, cst.CSTNode] = {}
        self._number: dict[int, int] = {}
        self._last: list[int] = []
        self._functions: dict[int, cst.FunctionDef | cst.Lambda | None] = {}
        holders: list[int] = []
        fields: dict[type, tuple[str, ...]] = {}
        stack: list[tuple[cst.CSTNode, int]] = [(tree, -1)]
        while stack:
            node, holder = stack.pop()
            number = len(holders)
            self._number[id(node)] = number
            holders.append(holder)
            kind = type(node)
            if kind not in fields:
                fields[kind] = tuple(f.name for f in dataclasses.fields(kind) if not f.name.startswith("_"))
            for name in fields[kind]:
                value = getattr(node, name)
                for child in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(child, cst.CSTNode):
                        self._parent[id(child)] = node
                        stack.append((child, number))
        self._last = list(range(len(holders)))
        for number in range(len(holders) - 1, 0, -1):
            holder = holders[number]
            self._last[holder] = max(self._last[holder], self._last[number])

    def of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node that holds `node`."""
        return self._parent.get(id(node))

    def __getitem__(self, node: cst.CSTNode) -> cst.CSTNode:
        return self._parent[id(node)]

    def all(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The holders of `node` from the inside out."""
        at = self._parent.get(id(node))
        while at is not None:
            yield at
            at = self._parent.get(id(at))

    def within(self, node: cst.CSTNode, holder: cst.CSTNode) -> bool:
        """Whether `holder` is `node` or holds it. Nodes of other trees lie in nothing but themselves."""
        inner, outer = self._number.get(id(node)), self._number.get(id(holder))
        if inner is None or outer is None:
            return node is holder
        return outer <= inner <= self._last[outer]

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | cst.Lambda | None:
        """The function or lambda that holds `node`; itself is not its own."""
        key = id(node)
        if key not in self._functions:
            holder = self._parent.get(key)
            found = holder if isinstance(holder, (cst.FunctionDef, cst.Lambda)) else None
            self._functions[key] = found or (self.function(holder) if holder is not None else None)
        return self._functions[key]


class _Wrapper(metadata.MetadataWrapper):
    """A wrapper that walks a tree for no visitors not at all; LibCST's own does so once for every `resolve`."""

    def visit_batched(self, visitors: Iterable[BatchableCSTVisitor], *hooks: Any) -> cst.CSTNode:
        return super().visit_batched(visitors, *hooks) if visitors else self.module


def positions(tree: cst.Module) -> Mapping[cst.CSTNode, metadata.CodeRange]:
    """Where every node stands, the white space around it left out. The tree must hold no node twice."""
    return _Wrapper(tree, unsafe_skip_copy=True).resolve(metadata.PositionProvider)


class _Provider:
    """What LibCST's scope visitor asks of its provider: a place for scopes, and which names are stored to."""

    def __init__(self, stored: set[int]) -> None:
        self.scopes: dict[cst.CSTNode, metadata.Scope | None] = {}
        self._stored = stored

    def set_metadata(self, node: cst.CSTNode, value: metadata.Scope) -> None:
        self.scopes[node] = value

    def get_metadata(self, _key: object, node: cst.CSTNode, _default: object = None) -> metadata.ExpressionContext:
        return metadata.ExpressionContext.STORE if id(node) in self._stored else metadata.ExpressionContext.LOAD


def scopes(tree: cst.Module, targets: list[cst.CSTNode]) -> dict[cst.CSTNode, metadata.Scope | None]:
    """The scope of every node, as `metadata.ScopeProvider` finds it; `targets` are all that is assigned to.

    (Through a MetadataWrapper this costs twice as much: each provider's walk is followed by an empty one, and which
    names are stored to takes a visitor for every target.)
    """
    stored: set[int] = set()
    while targets:
        target = targets.pop()
        if isinstance(target, cst.Name):
            stored.add(id(target))
        elif isinstance(target, (cst.Tuple, cst.List)):
            targets.extend(element.value for element in target.elements)
    provider = _Provider(stored)
    visitor = ScopeVisitor(provider)  # type: ignore[arg-type]  # it asks for these two methods and no more
    tree.visit(visitor)
    visitor.infer_accesses()
    return provider.scopes
