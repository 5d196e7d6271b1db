"""Which files a run looks at: those of some kinds under the given paths, and which of them are worth parsing."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from ..errors import SourceError
from .names import MARKERS

_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+)?import[ \t]+(\([^)]*\)|[^\n#]*)", re.MULTILINE)
_USES = re.compile(
    rb"\.module\b|state_dict|no_sync|clip_grad|optim|deepcopy|\.forward\(|\.backward\(|set_device|init_process_group"
)
_NOT_LOOKED_INTO = {"node_modules", "build", "dist", "__pycache__", "site-packages", "venv"}
_LARGEST_CONFIG = 1 << 20  # bytes; a larger YAML or JSON file is data


def found_files(paths: Iterable[Path], suffixes: Collection[str]) -> list[Path]:
    """All files of some suffixes below the paths, and every file that is named itself, each once.

    Hidden folders, environments and build outputs are not looked into; a link to a file that is there anyway is the
    same file. Raises SourceError on paths that do not exist or are neither file nor folder.
    """
    given = list(paths)
    if missing := [path for path in given if not path.exists()]:
        raise SourceError(
            "no such file or directory",
            why="nothing was read and nothing was changed",
            hint="give files, notebooks or directories that exist",
            faults=[str(path) for path in missing],
        )
    if odd := [path for path in given if not (path.is_file() or path.is_dir())]:
        raise SourceError(
            "neither a file nor a directory",
            why="only files can be rewritten",
            hint="give files, notebooks or directories",
            faults=[str(path) for path in odd],
        )
    named = [path for path in given if path.is_file()]
    below = [inner for path in given if path.is_dir() for inner in _walk(path) if inner.suffix in suffixes]
    found: dict[Path, Path] = {}
    for path in [*named, *(p for p in below if not p.is_symlink()), *(p for p in below if p.is_symlink())]:
        found.setdefault(path.resolve(), path)
    return sorted(found.values())


def is_small(path: Path) -> bool:
    """Whether a configuration file is small enough to be one."""
    return path.stat().st_size < _LARGEST_CONFIG


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_LOOKED_INTO)
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


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
