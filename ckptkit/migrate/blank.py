"""Closes the gaps that deleted statements leave: no more blank lines in a row than the old text has, or two."""

from __future__ import annotations


def closed(old: str, new: str) -> str:
    """`new` without the blank lines beyond two in a row, or beyond the longest gap of `old` where that is longer."""
    limit = max(2, _longest(old))
    if _longest(new) <= limit:
        return new
    lines, blank = [], 0
    for line in new.splitlines(keepends=True):
        blank = blank + 1 if not line.strip() else 0
        if blank <= limit:
            lines.append(line)
    return "".join(lines)


def _longest(text: str) -> int:
    longest = blank = 0
    for line in text.splitlines():
        blank = blank + 1 if not line.strip() else 0
        longest = max(longest, blank)
    return longest
