"""Which files a run looks at: Python files and notebooks under the given paths, and which of them are worth
parsing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import SourceError
from .names import MARKERS

_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+)?import[ \t]+(\([^)]*\)|[^\n#]*)", re.MULTILINE)
_USES = re.compile(
    rb"\.module\b|state_dict|no_sync|clip_grad|optim|deepcopy|\.forward\(|\.backward\(|set_device|init_process_group"
)
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
    """The files that mention an API, and those that import one of these (models travel through imports)."""
    markers = [marker.encode() for source in sources for marker in MARKERS[source]]
    chosen = {path for path, data in contents.items() if any(marker in data.lower() for marker in markers)}
    imports = {path: _imported(data) for path, data in contents.items() if path not in chosen}
    names = {name for path in chosen for name in _module_names(path)}
    frontier = {path for path, imported in imports.items() if imported & names}
    chosen |= frontier
    users = {path for path in imports.keys() - chosen if _USES.search(contents[path])}
    while frontier:
        names = {name for path in frontier for name in _module_names(path)}
        frontier = {path for path in users - chosen if imports[path] & names}
        chosen |= frontier
    return chosen


def _imported(data: bytes) -> set[str]:
    """The last two parts of every module and name that a file imports, as far as a pattern sees them."""
    found: set[str] = set()
    for match in _IMPORT.finditer(data):
        dotted, names = (group.decode(errors="replace") if group else "" for group in match.groups())
        parts = [part for part in dotted.split(".") if part]
        if parts and parts[0] in ("torch", "numpy", "transformers"):
            continue
        ends = [name.split(" as ")[0].strip() for name in names.strip("()").split(",")]
        for end in ["", *ends]:
            whole = [*parts, *([end] if end else [])]
            if whole:
                found.add(".".join(whole[-2:]))
            if len(parts) < 2 and end:
                found.add(end)  # `from . import name`, or a name of a package that re-exports
    return found


def _module_names(path: Path) -> set[str]:
    """The ways in which an import may end that means a file: its name, with its folder where the name says little."""
    name = path.parent.name if path.stem == "__init__" else path.stem
    folder = path.parent.parent.name if path.stem == "__init__" else path.parent.name
    return {name, f"{folder}.{name}"}
