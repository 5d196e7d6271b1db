"""Quotes of new text inside an f-string: before Python 3.12 they may not be the string's own."""

from __future__ import annotations

import libcst as cst

from .edit import Piece
from .module import Module


def requoted(module: Module, node: cst.CSTNode, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces that replace a node, with the other quotes where it stands in an f-string of the same ones."""
    around = next((one for one in module.ancestors(node) if isinstance(one, cst.FormattedString)), None)
    quote = around.quote if around is not None else ""
    if len(quote) != 1:  # none, or three: those take single ones inside
        return pieces
    other = "'" if quote == '"' else '"'
    return tuple(
        piece.replace(quote, other) if isinstance(piece, str) and other not in piece else piece for piece in pieces
    )
