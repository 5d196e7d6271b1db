"""Edits as spans of the original text and what replaces them; a replacement may quote other spans, which keep their
edits.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `[start, stop)` of the original text. As a piece of a replacement it quotes that text, edits
    included.
    """

    start: int
    stop: int

    def holds(self, other: Span) -> bool:
        """Whether `other` lies within this span."""
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True, slots=True)
class Dedent:
    """Quotes a span of whole statements one level further out: `prefix` goes from the start of each line after the
    first.
    """

    span: Span
    prefix: str


Piece = str | Span | Dedent


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """Replace `span` by `pieces`. A zero-width span inserts; `before` tells to which side the insertion belongs.

    `order` sorts insertions at one place. `moved` marks the old place of a statement that another edit quotes.
    """

    span: Span
    pieces: tuple[Piece, ...]
    order: int = 0
    before: bool = True
    moved: bool = False

    @property
    def inserts(self) -> bool:
        return self.span.start == self.span.stop


class OverlapError(Exception):
    """Two edits cross each other: a rule rewrote a part of what another one rewrites. Always a bug of a rule."""


@dataclass(slots=True)
class Rendering:
    """Applies edits to text; quoting a span applies the edits that lie inside it."""

    content: str
    edits: list[Edit] = field(default_factory=list)
    kept: list[Span] = field(default_factory=list)

    def whole(self) -> str:
        """The text with all edits applied; `kept` then lists the original spans that are still in it.

        Raises OverlapError.
        """
        self.kept = []
        return self._span(Span(0, len(self.content)), whole=True, active=())

    def shows(self, offset: int) -> bool:
        """Whether the character at an offset of the original is still there after `whole`."""
        return any(span.start <= offset < span.stop for span in self.kept)

    def _inside(self, span: Span, *, whole: bool, active: tuple[Edit, ...]) -> list[Edit]:
        found = []
        for edit in self.edits:
            if edit in active or not span.holds(edit.span):
                continue
            if edit.inserts and not whole:
                at = edit.span.start
                within = span.start < at < span.stop
                mine = (at == span.start and edit.before) or (at == span.stop and not edit.before)
                if not within and not (mine and self._is_lines(span)):
                    continue
            if edit.moved and edit.span == span and not whole:
                continue
            found.append(edit)
        # At one place: what belongs to the line above, then insertions by order, then the widest replacement.
        found.sort(key=lambda e: (e.span.start, not e.inserts, e.before, e.order, -e.span.stop))
        return found

    def _is_lines(self, span: Span) -> bool:
        at_start = span.start == 0 or self.content[span.start - 1] in "\r\n"
        at_stop = span.stop == len(self.content) or (span.stop > 0 and self.content[span.stop - 1] in "\r\n")
        return at_start and at_stop

    def _span(self, span: Span, *, whole: bool, active: tuple[Edit, ...]) -> str:
        out: list[str] = []
        at = span.start
        for edit in self._inside(span, whole=whole, active=active):
            if edit.span.start < at:
                if edit.span.stop > at:
                    raise OverlapError(f"edits cross at {edit.span} {self.content[edit.span.start : edit.span.stop]!r}")
                continue  # lies in what a wider edit replaced: it shows only where that edit quotes it
            out.append(self._keep(at, edit.span.start))
            for piece in edit.pieces:
                out.append(self._piece(piece, (*active, edit)))
            at = max(at, edit.span.stop)
        out.append(self._keep(at, span.stop))
        return "".join(out)

    def _piece(self, piece: Piece, active: tuple[Edit, ...]) -> str:
        if isinstance(piece, str):
            return piece
        if isinstance(piece, Span):
            return self._span(piece, whole=False, active=active)
        first, *rest = self._span(piece.span, whole=False, active=active).splitlines(keepends=True)
        return "".join([first.removeprefix(piece.prefix), *(line.removeprefix(piece.prefix) for line in rest)])

    def _keep(self, start: int, stop: int) -> str:
        if start < stop:
            self.kept.append(Span(start, stop))
        return self.content[start:stop]
