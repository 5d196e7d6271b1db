"""The files of one run as one program: which module an import names, and where a module-level name comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst
from libcst.helpers import get_full_name_for_node

from .module import Module


@dataclass(slots=True)
class Program:
    """All modules of a run. `unread` holds the files that nothing asked for yet; imports pull them in."""

    modules: dict[Path, Module] = field(default_factory=dict)
    unread: dict[Path, Callable[[], Module | None]] = field(default_factory=dict)
    _by_name: dict[str, list[Path]] = field(default_factory=dict)  # all files by the last part of their import name
    _indexed: int = 0
    _found: dict[tuple[str, Path, int], Path | None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Module]:
        return iter(list(self.modules.values()))

    def load(self, path: Path) -> Module | None:
        """The module of a file of this run, parsed on first use; None when it is not of this run or cannot be
        parsed.
        """
        if path not in self.modules and path in self.unread:
            module = self.unread.pop(path)()
            if module is not None:
                self.modules[path] = module
        return self.modules.get(path)

    def find(self, name: str, importer: Module, level: int = 0) -> Module | None:
        """The module that `import name` in `importer` means, if it is part of this run.

        `level` counts the dots of a relative import. Of several files that end in the dotted name the one that shares
        the longest path with the importer wins, as it would with the importer's folder or root on `sys.path`.
        """
        if self._indexed != len(self.modules) + len(self.unread):
            self._index()
        key = (name, importer.path, level)
        if key not in self._found:
            self._found[key] = self._search([part for part in name.split(".") if part], importer.path, level)
        found = self._found[key]
        return self.load(found) if found is not None else None

    def _index(self) -> None:
        known = [*self.modules, *self.unread]
        self._indexed = len(known)
        self._by_name, self._found = {}, {}
        for path in known:
            name = path.parent.name if path.name == "__init__.py" else path.stem
            self._by_name.setdefault(name, []).append(path)

    def _search(self, parts: list[str], importer: Path, level: int) -> Path | None:
        if level:
            base = importer.parent
            for _ in range(level - 1):
                base = base.parent
            wanted = [base.joinpath(*parts).with_suffix(".py") if parts else base / "__init__.py"]
            wanted.append(base.joinpath(*parts, "__init__.py"))
            return next((path for path in wanted if path in self.modules or path in self.unread), None)
        if not parts or parts[0] in ("torch", "deepspeed"):  # a folder `deepspeed` of the program is not what is meant
            return None
        tails = ((*parts[:-1], parts[-1] + ".py"), (*parts, "__init__.py"))
        known = self._by_name.get(parts[-1], ())
        fits = (path for path in known if any(path.parts[-len(tail) :] == tail for tail in tails))
        found = [path for path in fits if path != importer]  # `datasets.py` imports another `datasets`
        return min(found, key=lambda path: -_shared(path, importer), default=None)

    def imported(
        self, statement: cst.Import | cst.ImportFrom, local: str, importer: Module
    ) -> tuple[str, Module | None]:
        """What a local name that an import statement binds stands for: its dotted name, and the module of the run that
        it is taken from (with the name relative to that module; empty for the module itself)."""
        if isinstance(statement, cst.Import):
            for alias in statement.names:
                full = get_full_name_for_node(alias.name) or ""
                if alias.asname and get_full_name_for_node(alias.asname.name) == local:
                    module = self.find(full, importer)
                    return ("", module) if module else (full, None)
                if not alias.asname and full.split(".")[0] == local:
                    return local, None
            return local, None
        base = get_full_name_for_node(statement.module) if statement.module else ""
        level = len(statement.relative)
        for alias in statement.names if not isinstance(statement.names, cst.ImportStar) else ():
            name = get_full_name_for_node(alias.name) or ""
            bound = get_full_name_for_node(alias.asname.name) if alias.asname else name
            if bound != local:
                continue
            submodule = self.find(f"{base}.{name}" if base else name, importer, level)
            if submodule is not None:
                return "", submodule
            module = self.find(base or "", importer, level)
            if module is not None:
                return name, module
            return f"{'.' * level}{base}.{name}", None
        return local, None


def _shared(one: Path, other: Path) -> int:
    count = 0
    for a, b in zip(one.parts, other.parts, strict=False):
        if a != b:
            break
        count += 1
    return count
