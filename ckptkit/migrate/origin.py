"""Origins: where a value was made, as far as the text of a program shows it."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from .module import Module

CALL, NAME, CLASS, FUNCTION, LITERAL, INSTANCE = "call", "name", "class", "function", "literal", "instance"
LITERALS = (
    cst.Integer,
    cst.Float,
    cst.SimpleString,
    cst.ConcatenatedString,
    cst.FormattedString,
    cst.Dict,
    cst.List,
    cst.Set,
    cst.Tuple,
    cst.Lambda,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was made.

    kind `call`: a call of the API `name` (`name[0]` for the first value unpacked from it); `instance`: a call of a
    class of the program; `name`: a reference to the API `name`; `class`/`function`: a definition in the program;
    `literal`: a constant, container or lambda.
    """

    module: Module
    node: cst.CSTNode
    kind: str
    name: str = ""

    def __hash__(self) -> int:
        return hash((id(self.node), self.kind, self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin) and (self.node is other.node, self.kind, self.name) == (
            True,
            other.kind,
            other.name,
        )


Origins = frozenset[Origin]
NOTHING: Origins = frozenset()
