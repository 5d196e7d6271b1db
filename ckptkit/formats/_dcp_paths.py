"""DCP keys and trees: a nested state dict from keys and their paths, and the keys and paths of a nested state dict.

Source: `flatten_state_dict`, `traverse_state_dict` and `set_element` in torch/distributed/checkpoint (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..core.spec import Tensor
from ..core.tree import Path, Tree, dotted
from ..errors import SourceError


class _Branch(dict[Any, Any]):
    """A container while the tree grows, told apart from a dict that is a leaf."""


def nested(items: Iterable[tuple[str, Path, Any]], *, keys_are_text: bool) -> Tree:
    """The tree of `(key, path, leaf)`.

    Integers in a path are list indexes since torch 2.4 (`keys_are_text`). Before, they may be dict keys as well:
    children numbered 0 to n-1 make a list unless they stand below `state`, where optimizers number parameters.
    Raises SourceError naming every key that stands where another key's container should be.
    """
    root = _Branch()
    faults: list[str] = []
    for key, path, leaf in items:
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, _Branch()) if isinstance(at, _Branch) else at
        if not path or not isinstance(at, _Branch) or path[-1] in at:
            faults.append(f"{key}: its path {path} is another item's, or leads through one")
            continue
        at[path[-1]] = leaf
    if faults:
        raise SourceError(
            ".metadata gives two items one place",
            why="their paths clash when they are nested",
            hint="copy it again",
            faults=faults[:50],
        )
    return _grown(root, "", keys_are_text)


def _grown(branch: Any, name: Any, keys_are_text: bool) -> Tree:
    if not isinstance(branch, _Branch):
        return branch
    children = {key: _grown(child, key, keys_are_text) for key, child in branch.items()}
    if not children or not all(isinstance(key, int) for key in children):
        return children
    if sorted(children) == list(range(len(children))) and (keys_are_text or name != "state"):
        return [children[index] for index in range(len(children))]
    if keys_are_text and max(children) < 2 * len(children) + 64:
        # An element that was an empty dict has no key of its own; torch puts None there.
        return [children.get(index) for index in range(max(children) + 1)]
    return children


def flattened(tree: Mapping[Any, Any]) -> Iterator[tuple[Path, Any]]:
    """Paths and leaves as `flatten_state_dict` makes them: dict keys as text, lists entered only where they hold
    tensors or dicts; tuples are leaves. Empty dicts give nothing."""
    for key, value in tree.items():
        yield from _visit((str(key),), value)


def _visit(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _visit((*path, str(key)), child)
    elif isinstance(value, list) and not is_leaf(value):
        for index, child in enumerate(value):
            yield from _visit((*path, index), child)
    else:
        yield path, value


def is_leaf(value: Any) -> bool:
    """Whether torch saves a value as one object: all but dicts, and lists that hold a tensor or a dict."""
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(
        isinstance(child, Tensor) or (isinstance(child, Mapping | list) and not is_leaf(child)) for child in value
    )


def keyed(tree: Mapping[Any, Any], clash: Callable[[str], None]) -> dict[str, tuple[Path, Any]]:
    """The leaves by their DCP keys; `clash` is told of every key that two leaves would have."""
    out: dict[str, tuple[Path, Any]] = {}
    for path, value in flattened(tree):
        key = dotted(path)
        if key in out:
            clash(key)
        out[key] = (path, value)
    return out
