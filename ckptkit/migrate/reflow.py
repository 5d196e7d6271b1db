"""Breaks the lines that edits made too long, as black and ruff would: at the last bracket, else one item a line."""

from __future__ import annotations

import ast
import io
import itertools
import token
import tokenize
import warnings
from dataclasses import dataclass

LIMIT = 120
_OPEN, _CLOSE = "([{", ")]}"
_QUIET = (token.NEWLINE, token.NL, token.INDENT, token.DEDENT, token.ENDMARKER)


def reflow(old: str, new: str, masked: str, step: str) -> str:
    """`new` with each line broken that is over the limit and does not stand in `old`.

    The limit is 120 columns, or what the third longest line of `old` takes. `masked` is `new` as it is parsed, with
    the same lines (of a notebook, magics are commented out there). Lines of strings that run over several lines, and
    lines without brackets, stay; so does all where the broken text would not be the same program to `ast`.
    """
    kept = set(old.splitlines())
    widths = sorted((_width(line) for line in kept if not line.lstrip().startswith("#")), reverse=True)
    limit = max(LIMIT, widths[2] if len(widths) > 2 else 0)
    lines = new.splitlines(keepends=True)
    bare = [line.rstrip("\r\n") for line in lines]
    long = [number for number, line in enumerate(bare) if _width(line) > limit and line not in kept]
    if not long:
        return new
    try:
        closed = _whole_tokens(masked)
    except (tokenize.TokenError, SyntaxError):
        return new
    plain = masked.splitlines(keepends=True)
    for number in reversed(long):
        text = bare[number]
        end = lines[number][len(text) :]
        if number not in closed or text.lstrip().startswith("#") or text.endswith("\\"):
            continue
        lines[number] = plain[number] = (end or "\n").join(broken(text, step, limit)) + end
    return "".join(lines) if _same_program(masked, "".join(plain)) else new


def tree_of(text: str) -> ast.Module:
    """What Python itself parses; its warnings about a user's code (`x is "0"`) are not ours to print."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _same_program(one: str, other: str) -> bool:
    try:
        return ast.dump(tree_of(one)) == ast.dump(tree_of(other))
    except (SyntaxError, ValueError, RecursionError):
        return False


def broken(line: str, step: str, limit: int = LIMIT) -> list[str]:
    """A line as several that fit, as far as its brackets allow."""
    parts = _Parts.of(line)
    if parts is None or _width(parts.code) <= limit:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    found = _split_values(parts, indent, step) or _split_last(parts, indent, step, limit)
    if found is None:
        return [line]
    if parts.comment:
        found[-1] += f"  {parts.comment}"
    return [piece for one in found for piece in (broken(one, step, limit) if one != line else [one])]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The code of a line, its trailing comment, the brackets that close in it, and its outer commas and `=`."""

    code: str
    comment: str
    pairs: tuple[tuple[int, int], ...]  # outermost ones, `[open, close]`
    commas: tuple[int, ...]
    equals: tuple[int, ...]

    @classmethod
    def of(cls, line: str) -> _Parts | None:
        marks = _marks(line)
        if marks is None:
            return None
        stack: list[int] = []
        pairs: list[tuple[int, int]] = []
        commas: list[int] = []
        equals: list[int] = []
        stop = len(line)
        for at, text, kind in marks:
            if kind == token.COMMENT:
                stop = at
            elif text in _OPEN:
                stack.append(at)
            elif text in _CLOSE:
                if stack:
                    start = stack.pop()
                    pairs = [pair for pair in pairs if pair[0] < start]
                    pairs.append((start, at))
                else:
                    pairs, commas, equals = [], [], []  # it closes what a line above opened
            elif not stack and text == ",":
                commas.append(at)
            elif not stack and text == "=":
                equals.append(at)
        if stack:  # it opens what a line below closes: what is before that
            pairs = [pair for pair in pairs if pair[1] < stack[0]] or [p for p in pairs if p[0] > stack[-1]]
        return cls(line[:stop].rstrip(), line[stop:], tuple(pairs), tuple(commas), tuple(equals))


def _split_values(parts: _Parts, indent: str, step: str) -> list[str] | None:
    """`a, b = f(...), g(...)` with the values in parentheses, one a line."""
    if not parts.equals or not any(comma > parts.equals[-1] for comma in parts.commas):
        return None
    start = parts.equals[-1] + 1
    values = _items(parts.code[start:], [comma - start for comma in parts.commas if comma > start])
    return [f"{parts.code[:start]} (", *(f"{indent}{step}{value}," for value in values), f"{indent})"]


def _split_last(parts: _Parts, indent: str, step: str, limit: int) -> list[str] | None:
    """The last bracket with something in it opened: its contents on one line, or one item a line."""
    for start, stop in reversed(parts.pairs):
        body = parts.code[start + 1 : stop].strip()
        if not body:
            continue
        head, tail = parts.code[: start + 1], indent + parts.code[stop:]
        inner = indent + step
        if _width(inner + body) <= limit and not body.endswith(","):
            return [head, inner + body, tail]
        marks = _marks(body)
        outer = _outer(marks) if marks is not None else []
        words = {text for _, text in outer}
        if "," in words and not words & {"lambda", "for"}:
            items = [f"{item}," for item in _items(body, [at for at, text in outer if text == ","])]
        elif "for" in words:
            first = next(at for at, text in outer if text == "for")
            items = _clauses(body, [at for at, text in outer if text in ("for", "if") and at >= first])
        else:
            splits = ("if", "else") if "else" in words else ("and", "or")
            items = _clauses(body, [at for at, text in outer if text in splits])
        return [head, *(inner + item for item in items), tail]
    return None


def _outer(marks: list[tuple[int, str, int]]) -> list[tuple[int, str]]:
    """The commas and the words that divide what stands in a bracket, outside of the brackets in it."""
    depth, found = 0, []
    for at, text, _ in marks:
        depth += (text in _OPEN) - (text in _CLOSE)
        if depth == 0 and text in (",", "for", "if", "else", "and", "or", "lambda"):
            found.append((at, text))
    return found


def _clauses(text: str, starts: list[int]) -> list[str]:
    return [text[a:b].strip() for a, b in itertools.pairwise([0, *starts, len(text)])]


def _items(text: str, commas: list[int]) -> list[str]:
    starts = [0, *(comma + 1 for comma in commas)]
    stops = [*commas, len(text)]
    return [item for a, b in zip(starts, stops, strict=True) if (item := text[a:b].strip())]


def _marks(line: str) -> list[tuple[int, str, int]] | None:
    """(offset, text, kind) of the tokens of one line; None where a string is left open in it."""
    found = []
    texts = 0  # f-strings around a token, of Python 3.12 and later
    try:
        for one in tokenize.generate_tokens(io.StringIO(line.lstrip()).readline):
            texts += token.tok_name[one.type] == "FSTRING_START"
            texts -= token.tok_name[one.type] == "FSTRING_END"
            if texts:
                continue
            if one.type == token.ERRORTOKEN and one.string.strip() and one.string[0] in "'\"":
                return None
            if one.type not in _QUIET and (one.type != token.STRING or one.start[0] == one.end[0]):
                found.append((one.start[1] + len(line) - len(line.lstrip()), one.string, one.type))
    except tokenize.TokenError:  # a bracket that a line below closes
        pass
    except (SyntaxError, IndentationError):
        return None
    return [(at, text if kind in (token.OP, token.NAME, token.COMMENT) else "''", kind) for at, text, kind in found]


def _whole_tokens(text: str) -> set[int]:
    """Numbers (from 0) of the lines that no string runs into or out of."""
    inside: set[int] = set()
    depth: list[int] = []
    total = len(text.splitlines())
    for one in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.tok_name[one.type] == "FSTRING_START":
            depth.append(one.start[0])
        elif token.tok_name[one.type] == "FSTRING_END":
            first = depth.pop()
            if first != one.end[0]:
                inside.update(range(first - 1, one.end[0]))
        elif one.start[0] != one.end[0] and one.type == token.STRING:
            inside.update(range(one.start[0] - 1, one.end[0]))
    return set(range(total)) - inside


def _width(line: str) -> int:
    return len(line.expandtabs(4))
