"""Edits of the entries of a dict literal or the keyword arguments of a call: values, additions, removals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import libcst as cst

from .draft import Draft
from .edit import Piece, Span


@dataclass(slots=True)
class Entries:
    """The entries of one dict or call, in order, and what shall become of them; `write` makes the edits."""

    draft: Draft
    holder: cst.Dict | cst.Call
    nodes: dict[str, cst.DictElement | cst.Arg]
    _values: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    _added: dict[str, str] = field(default_factory=dict)
    _dropped: set[str] = field(default_factory=set)

    def value(self, name: str) -> cst.BaseExpression | None:
        """The expression that is given for a name."""
        node = self.nodes.get(name)
        return node.value if node is not None else None

    def put(self, name: str, code: str) -> None:
        """Give a name this value: in its place, or as a new entry."""
        if name in self.nodes:
            self._values[name] = (code,)
        else:
            self._added[name] = code

    def drop(self, names: Iterable[str]) -> None:
        """Take entries out."""
        self._dropped |= set(names) & self.nodes.keys()

    def write(self) -> None:
        """Make the edits: new entries take the place of the first that goes, else they follow the last one."""
        module, names = self.draft.module, list(self.nodes)
        added = [self._spelled(name, code) for name, code in self._added.items()]
        dropped = [name for name in names if name in self._dropped]
        if not names:
            self._first(", ".join(added))
            return
        for name, pieces in self._values.items():
            self.draft.replace(self.nodes[name].value, *pieces)
        if added and dropped:
            node = self.nodes[dropped.pop(0)]
            self.draft.replace_span(module.span(node), self._joined(added, node))
        elif added:
            last = self.nodes[names[-1]]
            whole = module.span(last)
            lead = self._separator(last)
            self.draft.replace_span(whole, *self._last(names[-1], whole), lead + self._joined(added, last))
        for name in dropped:
            self._remove(names, name)

    def _first(self, added: str) -> None:
        module, holder = self.draft.module, self.holder
        if isinstance(holder, cst.Dict):
            self.draft.replace(holder, "{", added, "}")
        elif holder.args:
            last = module.span(holder.args[-1])
            self.draft.replace_span(last, last, ", " + added)
        else:
            self.draft.replace_span(Span(module.span(holder.func).stop, module.span(holder).stop), f"({added})")

    def _last(self, name: str, whole: Span) -> tuple[Piece, ...]:
        if name not in self._values:
            return (whole,)
        value = self.draft.module.span(self.nodes[name].value)
        return (self.draft.module.text.content[whole.start : value.start], *self._values[name])

    def _spelled(self, name: str, code: str) -> str:
        return f'"{name}": {code}' if isinstance(self.holder, cst.Dict) else f"{name}={code}"

    def _separator(self, node: cst.CSTNode) -> str:
        """What stands between this entry and a new one: a line break where entries have lines of their own."""
        text, start = self.draft.module.text, self.draft.module.span(node).start
        indent = text.content[text.line_start(start) : start]
        return ", " if indent.strip() else f",{text.newline}{indent}"

    def _joined(self, added: list[str], node: cst.CSTNode) -> str:
        return self._separator(node).join(added)

    def _remove(self, names: list[str], name: str) -> None:
        module, content = self.draft.module, self.draft.module.text.content
        span, index = module.span(self.nodes[name]), names.index(name)
        start, end = module.text.line_start(span.start), module.text.line_end(span.stop - 1)
        rest = content[span.stop : end].strip().lstrip(",").strip()
        if not content[start : span.start].strip() and (not rest or rest.startswith("#")):
            self.draft.replace_span(Span(start, end))
        elif index + 1 < len(names):
            self.draft.replace_span(Span(span.start, module.span(self.nodes[names[index + 1]]).start))
        else:
            kept = [one for one in names if one not in self._dropped]
            begin = module.span(self.nodes[kept[-1]]).stop if kept else span.start
            self.draft.replace_span(Span(begin, span.stop))


def of_dict(draft: Draft, node: cst.Dict) -> Entries | None:
    """The entries of a dict literal; None where a key is no plain string."""
    found: dict[str, cst.DictElement | cst.Arg] = {}
    for element in node.elements:
        if not isinstance(element, cst.DictElement) or not isinstance(element.key, cst.SimpleString):
            return None
        found[str(element.key.evaluated_value)] = element
    return Entries(draft, node, found)


def of_call(draft: Draft, node: cst.Call) -> Entries | None:
    """The keyword arguments of a call; None where some are given as `**kwargs`."""
    return None if any(argument.star == "**" for argument in node.args) else by_name(draft, node)


def by_name(draft: Draft, node: cst.Call) -> Entries:
    """The arguments that a call itself names, whatever `**kwargs` beside them hold."""
    named = {one.keyword.value: one for one in node.args if one.keyword is not None}
    return Entries(draft, node, dict(named))


def spelled(value: object) -> str:
    """A JSON-like value as Python source, with double quotes."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{spelled(key)}: {spelled(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(spelled, value)) + "]"
    return repr(value)
