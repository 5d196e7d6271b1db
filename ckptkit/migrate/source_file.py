"""A source file on disk and the modules in it: itself, or the parts of a notebook; collects their new texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .files import found_files
from .grade import Finding
from .notebook import Notebook, masked, place, read_notebook
from .report import Changed, Failed, Unchanged
from .text import Text, decode

SUFFIXES = (".py", ".ipynb")


@dataclass(slots=True)
class SourceFile:
    """One file, its modules by path (thunks: most files are never decoded), and what rules made of them."""

    path: Path
    data: bytes
    notebook: Notebook | None = None
    modules: dict[Path, Callable[[], Text]] = field(default_factory=dict)
    finished: bool = False  # whether one of the modules was looked at by the rules
    _new: tuple[str, str, bytes] | None = None

    def searched(self, module: Path) -> bytes:
        """The bytes to search for imports and API names."""
        return self.modules[module]().content.encode() if self.notebook else self.data

    def take(self, old: str, new: str, encoding: str) -> None:
        """Take over the edited text of one of the modules."""
        if self.notebook:
            self.notebook.edit(new)
        else:
            self._new = (old, new, new.encode(encoding))

    def parsed_as(self, content: str) -> str:
        """The text of a module as the parser takes it: a notebook's magics are commented out."""
        return masked(content) if self.notebook else content

    def located(self, finding: Finding, content: str) -> Finding:
        """A finding in a module as a place in the file: in a notebook the cell, and the line within it."""
        if not self.notebook:
            return finding
        cell, line = place(content, finding.line)
        return dataclasses.replace(finding, path=self.path, cell=cell, line=line)

    def failed(self, module: Path, reason: str, line: int = 0, *, bug: bool = False) -> Failed:
        """The outcome of a file one of whose modules could not be migrated."""
        if self.notebook and line:
            cell, line = place(self.modules[module]().content, line)
            reason = f"cell {cell}: {reason}"
        return Failed(self.path, reason, line, bug)

    def outcome(self) -> Changed | Unchanged:
        """What became of the file."""
        if self.notebook and self.notebook.edited:
            before, after = (self.notebook.content(edited=edited) for edited in (False, True))
            return Changed(self.path, before, after, self.notebook.encode(), self.data)
        if self._new:
            return Changed(self.path, *self._new, self.data)
        return Unchanged(self.path)


def read_files(paths: Iterable[Path], others: Iterable[str], failures: dict[Path, Failed]) -> list[SourceFile]:
    """The Python files and notebooks of the paths. What cannot be read is put into `failures`.

    A file that is named itself is taken whatever its suffix, but for the suffixes in `others`.
    """
    found = []
    for path in found_files(paths, SUFFIXES):
        if path.suffix in set(others):
            continue
        try:
            found.append(_read(path))
        except OSError as error:
            failures[path] = Failed(path, f"cannot be read: {error.strerror or error}")
        except SyntaxError as error:
            failures[path] = Failed(path, str(error))
    return found


def _read(path: Path) -> SourceFile:
    data = path.read_bytes()
    if path.suffix != ".ipynb":
        return SourceFile(path, data, modules={path: lambda: decode(data)})
    notebook = read_notebook(data)
    texts = notebook.modules(path)
    return SourceFile(path, data, notebook, {one: (lambda text=text: text) for one, text in texts.items()})  # type: ignore[misc]
