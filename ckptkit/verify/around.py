"""Puts a function of ours around one of somebody else's, under its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `make(original)` in the place of `owner.name`."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))
