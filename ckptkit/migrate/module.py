"""One parsed Python module: its tree, positions, parents and scopes, and the text that they point into."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import libcst as cst
from libcst import metadata

from .edit import Piece, Span
from .text import Text
from .tree import Holders, positions, scopes

NodeT = TypeVar("NodeT", bound=cst.CSTNode)
Function = cst.FunctionDef | cst.Lambda
_SKIP_LINE = re.compile(r"#\s*ckptkit:\s*skip\s*(?:$|[^-\w])")
_SKIP_FILE = re.compile(r"^\s*#\s*ckptkit:\s*skip-file\b", re.MULTILINE)
_LOOPS = (cst.For, cst.While)
_ASSIGNING = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.CompFor, cst.For)


@dataclass(slots=True)
class Module:
    """A module of the program. All node lookups go through here; nodes are compared by identity."""

    path: Path
    text: Text
    tree: cst.Module = field(init=False)
    names: set[str] = field(init=False)  # all names that are looked up or bound, in any scope
    _positions: dict[int, metadata.CodeRange] = field(init=False)
    _holders: Holders = field(init=False)
    _scopes: dict[cst.CSTNode, metadata.Scope | None] = field(init=False)
    _nodes: dict[type[cst.CSTNode], list[cst.CSTNode]] = field(init=False)
    _sorted: dict[tuple[type[cst.CSTNode], ...], tuple[list[int], list[cst.CSTNode]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = cst.parse_module(self.text.masked)
        self._holders = Holders(self.tree)
        self._positions, self._nodes = {}, {}
        for node, where in positions(self.tree).items():
            self._positions[id(node)] = where
            self._nodes.setdefault(type(node), []).append(node)
        targets: list[cst.CSTNode] = [node.target for kind in _ASSIGNING for node in self._nodes.get(kind, [])]  # type: ignore[attr-defined]
        targets += [node.name for node in self._nodes.get(cst.AsName, [])]  # type: ignore[attr-defined]
        self._scopes = scopes(self.tree, targets)
        self.names = {n.value for n in self._nodes.get(cst.Name, []) if not self._is_label(n)}  # type: ignore[attr-defined]

    @property
    def skipped(self) -> bool:
        """Whether a `# ckptkit: skip-file` comment takes the whole file out."""
        return bool(_SKIP_FILE.search(self.text.content))

    def _is_label(self, name: cst.CSTNode) -> bool:
        """Whether a Name node is no variable: an attribute, a keyword of a call, or a part of a dotted import."""
        holder = self._holders.of(name)
        if isinstance(holder, cst.Attribute):
            return holder.attr is name
        return isinstance(holder, cst.Arg) and holder.keyword is name

    # -- nodes ---------------------------------------------------------------------------------------------------

    def every(self, *kinds: type[NodeT]) -> list[NodeT]:
        """All nodes of some types in the order of the text."""
        return self._ordered(kinds)[1]  # type: ignore[return-value]

    def inside(self, holder: cst.CSTNode, *kinds: type[NodeT]) -> list[NodeT]:
        """The nodes of some types that lie within a node, in the order of the text."""
        span = self.span(holder)
        starts, nodes = self._ordered(kinds)
        some = nodes[bisect.bisect_left(starts, span.start) : bisect.bisect_right(starts, span.stop)]
        return [node for node in some if self.within(node, holder)]  # type: ignore[misc]

    def _ordered(self, kinds: tuple[type[cst.CSTNode], ...]) -> tuple[list[int], list[cst.CSTNode]]:
        if kinds not in self._sorted:
            nodes = [node for kind in kinds for node in self._nodes.get(kind, [])]
            nodes.sort(key=lambda n: self.span(n).start)
            self._sorted[kinds] = [self.span(n).start for n in nodes], nodes
        return self._sorted[kinds]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node that holds `node`."""
        return self._holders.of(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The holders of `node` from the inside out."""
        return self._holders.all(node)

    def up(self, node: cst.CSTNode, *kinds: type[NodeT]) -> NodeT | None:
        """The nearest holder of one of some types."""
        return next((a for a in self.ancestors(node) if isinstance(a, kinds)), None)

    def within(self, node: cst.CSTNode, holder: cst.CSTNode) -> bool:
        """Whether `holder` is `node` or holds it."""
        return self._holders.within(node, holder)

    def function(self, node: cst.CSTNode) -> Function | None:
        """The function or lambda in whose body (or defaults) `node` lies."""
        return self._holders.function(node)

    def statement(self, node: cst.CSTNode) -> cst.BaseSmallStatement | cst.BaseCompoundStatement:
        """The smallest statement that holds `node`: one of `a; b`, or the compound one whose header holds it."""
        for at in (node, *self.ancestors(node)):
            if isinstance(at, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                return at
        raise LookupError("a node outside every statement")

    def line(self, node: cst.CSTNode) -> cst.CSTNode:
        """The logical line of a statement: what a block holds in its body."""
        if isinstance(node, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            return node
        statement = self.statement(node)
        if isinstance(statement, cst.BaseSmallStatement):
            return self._holders[statement]
        return statement

    def block(self, node: cst.CSTNode) -> cst.CSTNode:
        """What holds the line of `node`: a module, an indented block, or a one-line suite."""
        line = self.line(node)
        return line if isinstance(line, cst.SimpleStatementSuite) else self._holders[line]

    def siblings(self, node: cst.CSTNode) -> Sequence[cst.CSTNode]:
        """The lines of the block of `node`, in order."""
        block = self.block(node)
        return getattr(block, "body", ())

    def sibling_of(self, node: cst.CSTNode, block: cst.CSTNode) -> cst.CSTNode | None:
        """The line directly in `block` that holds `node`."""
        for at in (node, *self.ancestors(node)):
            if self._holders.of(at) is block:
                return at
        return None

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        """The scope in which the names of `node` are looked up."""
        for at in (node, *self.ancestors(node)):
            scope = self._scopes.get(at)
            if scope is not None:
                return scope
        return None

    def loops(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Loops around `node` within its function, from the inside out."""
        found: list[cst.CSTNode] = []
        for at in self.ancestors(node):
            if isinstance(at, (cst.FunctionDef, cst.Lambda)):
                break
            if isinstance(at, _LOOPS):
                found.append(at)
        return found

    # -- text ----------------------------------------------------------------------------------------------------

    def span(self, node: cst.CSTNode) -> Span:
        """The characters of a node without the parentheses around it."""
        where = self._positions[id(node)]
        start = self.text.offset(where.start.line, where.start.column)
        return Span(start, self.text.offset(where.end.line, where.end.column))

    def code(self, node: cst.CSTNode) -> str:
        """The source of a node as it stands, without the parentheses around it."""
        span = self.span(node)
        return self.text.content[span.start : span.stop]

    def quote(self, node: cst.CSTNode) -> tuple[Piece, ...]:
        """Pieces that repeat an expression, its parentheses and all edits inside it included."""
        depth = len(getattr(node, "lpar", ()))
        return ("(" * depth, self.span(node), ")" * depth) if depth else (self.span(node),)

    def lines(self, line: cst.CSTNode) -> Span:
        """The whole physical lines of a block's line, from its indentation to behind its newline."""
        span = self.span(line)
        stop = span.stop
        while stop > span.start and self.text.content[stop - 1] in " \t\r\n\f":
            stop -= 1
        return Span(self.text.line_start(span.start), self.text.line_end(max(stop - 1, 0)))

    def indent(self, node: cst.CSTNode) -> str:
        """The white space before the logical line that holds `node`."""
        start = self.span(self.line(node)).start
        prefix = self.text.content[self.text.line_start(start) : start]
        return prefix if not prefix.strip() else re.match(r"\s*", prefix).group()  # type: ignore[union-attr]

    def step(self) -> str:
        """One step of the file's own indentation."""
        return self.tree.default_indent

    def comments_above(self, line: cst.CSTNode) -> Span:
        """The comment lines that stand directly above a line, without a blank line between."""
        start = self.lines(line).start
        at = start
        while at > 0 and self.text.line(at - 1).lstrip().startswith("#"):
            at = self.text.line_start(at - 1)
        return Span(at, start)

    def comments_in(self, node: cst.CSTNode, kept: Sequence[Span] = ()) -> list[str]:
        """Comments inside a node, but for those within the spans that will be kept."""
        around = self.span(node)
        found = []
        for comment in self._nodes.get(cst.Comment, []):
            span = self.span(comment)
            if around.holds(span) and not any(k.holds(span) for k in kept):
                found.append(self.code(comment))
        return found

    def skips(self, node: cst.CSTNode) -> bool:
        """Whether a `# ckptkit: skip` comment stands on a line of the statement, or alone on the line above it."""
        try:
            line = self.line(node)
        except LookupError:
            return False
        if isinstance(line, cst.BaseCompoundStatement):
            span = Span(self.lines(line).start, self.text.line_end(self.span(line).start))
        else:
            span = self.lines(line)
        above = self.text.line(span.start - 1) if span.start else ""
        here = self.text.content[span.start : span.stop]
        alone = above.lstrip().startswith("#") and bool(_SKIP_LINE.search(above))
        return alone or any(_SKIP_LINE.search(one) for one in here.splitlines())
