"""What DCP's keys cannot say, as a note beside them: empty dicts, keys that are no text, tied, frozen and buffer names.

torch makes text of every dict key, forgets empty dicts and does not know which names are tied. The note is one more
attribute of the pickled `Metadata`, of plain values: torch's loaders keep it and never look at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..core.tree import Path, Tree
from ._dcp_paths import is_leaf

_FACTS = ("buffers", "frozen")
_GAP = 10_000  # empty dicts one after the other in a list; more than that is damage


def note(tree: Tree, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The note of a tree: paths in text form. Empty where keys say all."""
    out: dict[str, Any] = {}
    found = list(_unsaid(tree, ()))
    out["empty"] = [path for path, key in found if key is None]
    out["keys"] = [(path, key[0]) for path, key in found if key is not None]
    out["aliases"] = dict(facts.get("aliases") or {})
    for name in _FACTS:
        if facts.get(name) is not None:
            out[name] = sorted(facts[name])
    return {name: value for name, value in out.items() if value or name in _FACTS}


def _unsaid(value: Tree, path: Path) -> Iterator[tuple[Path, tuple[Any] | None]]:
    if isinstance(value, Mapping):
        if not value and path:
            yield path, None
        for key, child in value.items():
            here = (*path, str(key))
            if not isinstance(key, str):
                yield here, (key,)
            yield from _unsaid(child, here)
    elif not is_leaf(value):
        for index, child in enumerate(value):
            yield from _unsaid(child, (*path, index))


def restored(tree: Tree, noted: Mapping[str, Any]) -> Tree:
    """The tree with its empty dicts and the keys of its dicts as they were. Raises TypeError or ValueError for a note
    that ckptkit cannot have written."""
    for path in noted.get("empty", ()):
        _put(tree, path)
    for path, key in sorted(noted.get("keys", ()), key=lambda item: -len(item[0])):
        holder = _at(tree, path[:-1])
        if isinstance(holder, dict) and path[-1] in holder:
            renamed = {(key if old == path[-1] else old): value for old, value in holder.items()}
            holder.clear()
            holder.update(renamed)
    return tree


def facts(noted: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a note that `Contents.facts` takes."""
    out: dict[str, Any] = {name: frozenset(noted[name]) for name in _FACTS if name in noted}
    return out | ({"aliases": dict(noted["aliases"])} if "aliases" in noted else {})


def _at(tree: Tree, path: Path) -> Any:
    for part in path:
        if isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        elif isinstance(tree, dict):
            tree = tree.get(part)
        else:
            return None
    return tree


def _put(tree: Tree, path: Path) -> None:
    """Put an empty dict at a path, with the lists and dicts on the way to it that DCP forgot."""
    for depth, part in enumerate(path):
        fresh: Any = [] if depth + 1 < len(path) and isinstance(path[depth + 1], int) else {}
        if isinstance(tree, list):
            if not isinstance(part, int) or part - len(tree) > _GAP:
                raise ValueError(f"an empty dict at {path}")
            tree.extend([None] * (part + 1 - len(tree)))
            tree[part] = fresh if tree[part] is None else tree[part]
            tree = tree[part]
        elif isinstance(tree, dict):
            tree = tree.setdefault(part, fresh)
        else:
            return
