"""Which files a run looks at: Python files and notebooks under the given paths, and which of them are worth
parsing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import SourceError
from .names import MARKERS

_NOT_SOURCES = {"node_modules", "build", "dist", "__pycache__", "site-packages", "venv"}


def python_files(paths: Iterable[Path]) -> list[Path]:
    """All `.py` and `.ipynb` files of the paths, directories searched through. Raises SourceError on a missing
    path.
    """
    found: dict[Path, None] = {}
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise SourceError("no such file or directory", faults=[str(path) for path in missing])
    for path in paths:
        if path.is_file():
            found[path] = None
            continue
        for inner in sorted(path.rglob("*")):
            parts = inner.relative_to(path).parts
            hidden = any(part.startswith(".") or part in _NOT_SOURCES for part in parts)
            if not hidden and inner.suffix in (".py", ".ipynb") and inner.is_file():
                found[inner] = None
    return list(found)


def worth_parsing(contents: dict[Path, bytes], sources: Iterable[str]) -> set[Path]:
    """The files that mention an API, and those that import one of these by name (models travel through them)."""
    markers = [marker.encode() for source in sources for marker in MARKERS[source]]
    chosen = {path for path, data in contents.items() if any(marker in data.lower() for marker in markers)}
    frontier = set(chosen)
    while frontier:
        stems = {path.parent.name if path.stem == "__init__" else path.stem for path in frontier}
        stems.discard("")
        names = b"|".join(re.escape(stem.encode()) for stem in sorted(stems))
        importing = re.compile(rb"^\s*(?:from|import)\s[^\n]*\b(?:" + names + rb")\b", re.MULTILINE)
        frontier = {path for path, data in contents.items() if path not in chosen and importing.search(data)}
        chosen |= frontier
    return chosen
