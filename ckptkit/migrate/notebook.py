"""A Jupyter notebook as one module: its code cells joined for parsing, and put back into the same JSON afterwards."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .text import Text

_MARK = "#%% ckptkit cell "
_MAGIC = re.compile(r"^(\s*)([%!?])", re.MULTILINE)
_LAYOUTS: list[dict[str, Any]] = [
    {"indent": indent, "ensure_ascii": ascii_only, "separators": separators}
    for indent in (1, 2, 4, None)
    for ascii_only in (False, True)
    for separators in ((",", ": "), (", ", ": "), (",", ":"))
]


@dataclass(slots=True)
class Notebook:
    """The parsed JSON of a notebook and the layout that writes it back byte for byte."""

    data: dict[str, Any]
    layout: dict[str, Any]
    tail: str

    def text(self) -> Text:
        """The code cells as one text, each behind a marker line; magics are commented out for the parser."""
        parts = []
        for index, cell in enumerate(self.data["cells"]):
            if cell.get("cell_type") != "code":
                continue
            source = _joined(cell)
            head = f"{_MARK}{index}\n"
            body = source if source.endswith("\n") or not source else source + "\n"
            parts.append(head + body)
        return Text("".join(parts), masked("".join(parts)), "utf-8")

    def bytes_with(self, content: str) -> bytes:
        """The notebook with the cells of an edited text, in its own layout."""
        pieces = re.split(rf"^{re.escape(_MARK)}(\d+)\n", content, flags=re.MULTILINE)
        data = json.loads(json.dumps(self.data))
        for index, body in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
            cell = data["cells"][index]
            old = _joined(cell)
            new = body if old.endswith("\n") else body.removesuffix("\n")
            if new != old:
                cell["source"] = new.splitlines(keepends=True) if isinstance(cell["source"], list) else new
        return (json.dumps(data, **self.layout) + self.tail).encode()


def masked(content: str) -> str:
    """The text of a notebook with its magics commented out, cell by cell."""
    pieces = re.split(rf"^({re.escape(_MARK)}\d+\n)", content, flags=re.MULTILINE)
    return "".join(one if one.startswith(_MARK) else _mask(one) for one in pieces)


def read_notebook(data: bytes) -> Notebook:
    """Read a notebook. Raises SyntaxError when it is none, or when its JSON layout could not be kept."""
    try:
        raw = data.decode()
        parsed = json.loads(raw)
    except ValueError as error:
        raise SyntaxError(f"not a notebook: {error}") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("cells"), list):
        raise SyntaxError("not a notebook of format 4: it has no list of cells")
    tail = raw[len(raw.rstrip()) :]
    for layout in _LAYOUTS:
        if json.dumps(parsed, **layout) + tail == raw:
            return Notebook(parsed, layout, tail)
    raise SyntaxError("the JSON is not laid out as nbformat writes it; save it once with Jupyter")


def _joined(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(source) if isinstance(source, list) else source


def _mask(body: str) -> str:
    if body.lstrip().startswith("%%"):
        return re.sub(r"^.", "#", body, flags=re.MULTILINE)
    # A lone magic inside a block must stay a statement there: `0` and a comment, of the same length.
    return _MAGIC.sub(lambda m: f"{m.group(1)}#" if not m.group(1) else f"{m.group(1)}0", _pad(body))


def _pad(body: str) -> str:
    def line(match: re.Match[str]) -> str:
        indent, mark, rest = match.groups()
        return f"{indent}{mark}#{rest[1:]}" if indent and rest else match.group()

    return re.sub(r"^([ \t]+)([%!?])(.*)$", line, body, flags=re.MULTILINE)
