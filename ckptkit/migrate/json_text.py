"""JSON with the place of every value in its text, so that one value can be replaced and all other bytes stay."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # what json itself reads strings with
from typing import Any

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|NaN|-?Infinity")
_DEEPEST = 200


@dataclass(frozen=True, slots=True)
class Entry:
    """One `"key": value` of an object; the key lies at `[start, stop)` of the text."""

    key: str
    start: int
    stop: int
    value: Node


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its characters `[start, stop)`. Objects have `entries`, arrays `items`, others a `scalar`."""

    start: int
    stop: int
    kind: str  # "object", "array" or "scalar"
    entries: tuple[Entry, ...] = ()
    items: tuple[Node, ...] = ()
    scalar: Any = None

    def get(self, key: str) -> Node | None:
        """The value of a key of an object; the last one, as `json.loads` does."""
        return next((entry.value for entry in reversed(self.entries) if entry.key == key), None)

    def plain(self) -> Any:
        """The value as `json.loads` gives it."""
        if self.kind == "object":
            return {entry.key: entry.value.plain() for entry in self.entries}
        return [item.plain() for item in self.items] if self.kind == "array" else self.scalar


@dataclass(slots=True)
class Splices:
    """Replacements of stretches of a text, to be applied at once."""

    text: str
    parts: list[tuple[int, int, str]] = field(default_factory=list)

    def put(self, start: int, stop: int, new: str) -> None:
        """Replace `[start, stop)`; equal bounds insert."""
        self.parts.append((start, stop, new))

    def applied(self) -> str:
        """The new text. A part within an earlier one is not shown."""
        out, at = [], 0
        for start, stop, new in sorted(self.parts, key=lambda part: (part[0], part[1])):
            if start < at:
                continue
            out += [self.text[at:start], new]
            at = stop
        return "".join([*out, self.text[at:]])


def parse(text: str) -> Node:
    """The tree of a JSON text. Raises ValueError, as `json.loads`, on what is none."""
    node, stop = _value(text, _skip(text, 0), 0)
    if _skip(text, stop) != len(text):
        raise json.JSONDecodeError("Extra data", text, _skip(text, stop))
    return node


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _value(text: str, at: int, depth: int) -> tuple[Node, int]:
    if depth > _DEEPEST:
        raise json.JSONDecodeError("Nested too deeply", text, at)
    first = text[at : at + 1]
    if first == '"':
        value, stop = scanstring(text, at + 1)
        return Node(at, stop, "scalar", scalar=value), stop
    if first in ("{", "["):
        return _container(text, at, depth)
    found = _SCALAR.match(text, at)
    if not found or not found.group():
        raise json.JSONDecodeError("Expecting value", text, at)
    return Node(at, found.end(), "scalar", scalar=json.loads(found.group())), found.end()


def _container(text: str, start: int, depth: int) -> tuple[Node, int]:
    is_object, close = text[start] == "{", "}" if text[start] == "{" else "]"
    entries: list[Entry] = []
    items: list[Node] = []
    at = _skip(text, start + 1)
    while text[at : at + 1] != close or entries or items:
        if is_object:
            if text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, stop = scanstring(text, at + 1)
            colon = _skip(text, stop)
            if text[colon : colon + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, colon)
            value, after = _value(text, _skip(text, colon + 1), depth + 1)
            entries.append(Entry(key, at, stop, value))
        else:
            value, after = _value(text, at, depth + 1)
            items.append(value)
        at = _skip(text, after)
        if text[at : at + 1] == close:
            break
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _skip(text, at + 1)
    kind = "object" if is_object else "array"
    return Node(start, at + 1, kind, tuple(entries), tuple(items)), at + 1
