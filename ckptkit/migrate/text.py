"""Text of a source file with its encoding, line ends and offsets, so that writing it back changes no other byte."""

from __future__ import annotations

import bisect
import io
import re
import tokenize
from dataclasses import dataclass, field

_NEWLINE = re.compile(r"\r\n|\r|\n")


@dataclass(slots=True)
class Text:
    """Decoded text; `masked` has the same length and is what is parsed (notebook magics are commented out there)."""

    content: str
    masked: str
    encoding: str
    newline: str = field(init=False)
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [0, *(match.end() for match in _NEWLINE.finditer(self.content))]
        first = _NEWLINE.search(self.content)
        self.newline = first.group() if first else "\n"

    def offset(self, line: int, column: int) -> int:
        """Offset in characters of a 1-based line and a 0-based column, as LibCST counts them."""
        return self.starts[line - 1] + column

    def place(self, offset: int) -> tuple[int, int]:
        """1-based line and 1-based column of an offset."""
        line = bisect.bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def line_start(self, offset: int) -> int:
        """Offset at which the line of `offset` starts."""
        return self.starts[bisect.bisect_right(self.starts, offset) - 1]

    def line_end(self, offset: int) -> int:
        """Offset just behind the newline that ends the line of `offset`, or the end of the text."""
        at = bisect.bisect_right(self.starts, offset)
        return self.starts[at] if at < len(self.starts) else len(self.content)

    def line(self, offset: int) -> str:
        """The whole line around `offset` without its newline."""
        return self.content[self.line_start(offset) : self.line_end(offset)].rstrip("\r\n")


def decode(data: bytes) -> Text:
    """Read Python source as Python does (BOM, coding cookie), keeping every newline. Raises SyntaxError."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        content = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise SyntaxError(f"not {error.encoding} text: {error.reason} at byte {error.start}") from error
    if "\0" in content:
        raise SyntaxError("source code cannot contain null bytes")
    return Text(content, content, encoding)
