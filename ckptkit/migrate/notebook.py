"""A Jupyter notebook as modules: its code cells joined for parsing, each `%%writefile x.py` cell a file of its own; the
sources are put back into the JSON where they were, all other bytes stay.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from . import json_text
from .json_text import Node
from .text import Text

_MARK = "#%% ckptkit cell "
_HEADS = re.compile(rf"^{re.escape(_MARK)}(\d+)\n", re.MULTILINE)
_RAW_LINE = re.compile(r"(?:[^\\]|\\[^n])*?\\n|(?:[^\\]|\\[^n])+")  # a line of a JSON string, escapes and all
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
# `!ls`, `%cd x`, `?name`, `name?`, and the values of `files = !ls`; group 1 is what stays.
_MAGIC = re.compile(r"([ \t]*)(?:!|%%?[A-Za-z]|\?|[\w.]+\?{1,2}[ \t]*$)|([\w., \t\[\]'\"]+=[ \t]*)(?:!|%[A-Za-z])")
_HOLD_PYTHON = [["time"], ["timeit"], ["capture"], ["prun"], ["memit"], ["mprun"]]
_WRITEFILE = re.compile(r"\s*%%(?:writefile|file)[ \t]+(?:-a[ \t]+)?[\"']?([^\s\"']+\.py)[\"']?[ \t]*\n")


@dataclass(frozen=True, slots=True)
class Cell:
    """A code cell: its number, counted from 1 among all cells, its source and where that lies in the JSON."""

    number: int
    source: str
    node: Node

    @property
    def writes(self) -> str:
        """The Python file that a `%%writefile` cell writes; empty for any other cell."""
        found = _WRITEFILE.match(self.source)
        return found.group(1) if found else ""


@dataclass(slots=True)
class Notebook:
    """The text of a notebook and its code cells. `edited` holds new sources by the number of the cell."""

    raw: str
    cells: list[Cell]
    edited: dict[int, str] = field(default_factory=dict)

    def modules(self, path: Path) -> dict[Path, Text]:
        """The notebook's own code under its path, and what `%%writefile` cells hold as files below that path."""
        own = [cell for cell in self.cells if not cell.writes]
        found = {path: _text(own)}
        for name in dict.fromkeys(cell.writes for cell in self.cells if cell.writes):
            below = [part for part in PurePosixPath(name).parts if part not in ("/", "..")]
            found[path.joinpath(*below)] = _text([cell for cell in self.cells if cell.writes == name])
        return found

    def shell_lines(self) -> list[tuple[int, int, str]]:
        """(cell, line, text) of every command that a cell gives to the shell, in `!...` or a `%%bash` cell."""
        found = []
        for cell in self.cells:
            lines = _LINE.findall(cell.source)
            if lines[0].split()[:1] in (["%%bash"], ["%%sh"]):
                found.append((cell.number, 2, "".join(lines[1:])))
                continue
            for index, line in enumerate(lines):
                if line.lstrip().startswith("!"):
                    last = index
                    while lines[last].rstrip("\r\n").endswith("\\") and last + 1 < len(lines):
                        last += 1
                    command = "".join(lines[index : last + 1])
                    found.append((cell.number, index + 1, command.lstrip().removeprefix("!")))
        return found

    def edit(self, content: str) -> None:
        """Take over the cells of an edited text of one of the modules."""
        old = {cell.number: cell.source for cell in self.cells}
        for number, body in cells(content).items():
            new = body if old[number].endswith("\n") else body.removesuffix("\n")
            if new != old[number]:
                self.edited[number] = new

    def content(self, *, edited: bool) -> str:
        """All code cells as one text, as they are or as they shall be."""
        return _joined({c.number: self.edited.get(c.number, c.source) if edited else c.source for c in self.cells})

    def encode(self) -> bytes:
        """The notebook with the edited sources; lines that stay keep their spelling in JSON."""
        splices = json_text.Splices(self.raw)
        for cell in self.cells:
            if cell.number in self.edited:
                splices.put(cell.node.start, cell.node.stop, self._spelled(cell, self.edited[cell.number]))
        return splices.applied().encode()

    def _spelled(self, cell: Cell, source: str) -> str:
        as_ascii = self.raw.isascii() and "\\u" in self.raw
        if cell.node.kind != "array":
            spelled = _RAW_LINE.findall(self.raw[cell.node.start + 1 : cell.node.stop - 1])
            whole = {json.loads(f'"{line}"'): line for line in spelled}
            lines = [whole.get(line) or json.dumps(line, ensure_ascii=as_ascii)[1:-1] for line in _LINE.findall(source)]
            return f'"{"".join(lines)}"'
        items = cell.node.items
        known = {item.scalar: self.raw[item.start : item.stop] for item in items}
        lines = [
            known.get(line) or json.dumps(line, ensure_ascii=as_ascii) for line in source.splitlines(keepends=True)
        ]
        head = self.raw[cell.node.start : items[0].start]
        tail = self.raw[items[-1].stop : cell.node.stop]
        between = self.raw[items[0].stop : items[1].start] if len(items) > 1 else "," + (head[1:] or " ")
        return head + between.join(lines) + tail


def read_notebook(data: bytes) -> Notebook:
    """Read a notebook of format 2 to 4; one of another language than Python has no code for us. Raises SyntaxError."""
    try:
        raw = data.decode()
        tree = json_text.parse(raw)
    except ValueError as error:
        raise SyntaxError(f"not a notebook: {error}") from error
    found: list[Cell] = []
    for number, cell in enumerate(_cells_of(tree), 1):
        kind, source = cell.get("cell_type"), cell.get("source") or cell.get("input")
        if kind is None or kind.scalar != "code" or source is None:
            continue
        lines = [item.scalar for item in source.items] if source.kind == "array" else [source.scalar]
        if all(isinstance(line, str) for line in lines) and "".join(lines):
            found.append(Cell(number, "".join(lines), source))
    return Notebook(raw, found if _is_python(tree) else [])


def cells(content: str) -> dict[int, str]:
    """The cells of a joined text, by number."""
    pieces = _HEADS.split(content)
    return dict(zip(map(int, pieces[1::2]), pieces[2::2], strict=True))


def place(content: str, line: int) -> tuple[int, int]:
    """The cell, and the line in it, of a line of a joined text. All count from 1."""
    lines = content.split("\n")
    for at in range(line - 1, -1, -1):
        if lines[at].startswith(_MARK):
            return int(lines[at].removeprefix(_MARK)), line - 1 - at
    return 1, line


def masked(content: str) -> str:
    """A joined text with its magics commented out, cell by cell."""
    pieces = re.split(rf"^({re.escape(_MARK)}\d+\n)", content, flags=re.MULTILINE)
    return "".join(one if one.startswith(_MARK) else _mask(one) for one in pieces)


def _cells_of(tree: Node) -> list[Node]:
    if (known := tree.get("cells")) is not None and known.kind == "array":
        return list(known.items)
    sheets = tree.get("worksheets")
    if sheets is None or sheets.kind != "array":
        raise SyntaxError("not a notebook: it has no list of cells")
    return [cell for sheet in sheets.items for cell in (sheet.get("cells") or sheet).items]


def _is_python(tree: Node) -> bool:
    metadata = tree.get("metadata")
    for part, key in (("language_info", "name"), ("kernelspec", "language")):
        holder = metadata.get(part) if metadata else None
        said = holder.get(key) if holder else None
        if said is not None and isinstance(said.scalar, str):
            return said.scalar.lower() in ("python", "ipython", "")
    return True


def _joined(sources: dict[int, str]) -> str:
    return "".join(
        f"{_MARK}{number}\n{body if body.endswith(chr(10)) or not body else body + chr(10)}"
        for number, body in sources.items()
    )


def _text(some: list[Cell]) -> Text:
    content = _joined({cell.number: cell.source for cell in some})
    return Text(content, masked(content), "utf-8")


def _mask(body: str) -> str:
    """A cell with every magic commented out, character for character; blocks that hold only one keep a statement."""
    lines = _LINE.findall(body)
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[first].startswith("%%"):
        if not _WRITEFILE.match(body) and lines[first][2:].split()[:1] not in _HOLD_PYTHON:
            return "".join(map(_comment, lines))
        lines[first] = _comment(lines[first])
    out: list[str] = []
    goes_on = opens = False  # a magic behind a backslash; a block that must not stay empty
    for line in lines:
        magic = _MAGIC.match(line)
        kept = (magic.group(1) or magic.group(2) or "") if magic else ""
        if goes_on or (magic and not kept.strip() and not (kept and opens)):
            out.append(_comment(line))
        elif magic:
            out.append(kept + "0" + _comment(line[len(kept) + 1 :]))
        else:
            out.append(line)
        if line.strip() and not line.lstrip().startswith("#"):
            opens = not magic and line.partition("#")[0].rstrip().endswith(":")
        goes_on = bool(goes_on or magic) and line.rstrip("\r\n").endswith("\\")
    return "".join(out)


def _comment(line: str) -> str:
    return re.sub(r"[^\r\n]", "#", line)
