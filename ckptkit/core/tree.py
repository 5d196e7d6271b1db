"""Trees: the nested dicts, lists and tuples of a checkpoint, with tensors, plain values and inert objects as leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .spec import Tensor, TensorKey

Path = tuple[Any, ...]
Tree = Any  # pickle forces it: dict | list | tuple of trees, Tensor, TensorRef, Opaque, or a plain Python value


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object of a class that was not imported: only its qualified name is known, and it cannot be carried."""

    kind: str

    def __str__(self) -> str:
        return f"object of class {self.kind}"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands in an extra for a tensor of the checkpoint: `checkpoint.read(*ref.key)` reads it."""

    key: TensorKey


def walk(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path, in order. Empty containers are leaves: they are told apart from absent ones."""
    if isinstance(tree, Mapping) and tree:
        for key, child in tree.items():
            yield from walk(child, (*path, key))
    elif isinstance(tree, list | tuple) and tree and not hasattr(tree, "_fields"):
        for index, child in enumerate(tree):
            yield from walk(child, (*path, index))
    else:
        yield path, tree


def mapped(tree: Tree, leaf: Callable[[Path, Any], Any], path: Path = ()) -> Tree:
    """The same tree with every leaf replaced by `leaf(path, value)`. Mappings become plain dicts."""
    if isinstance(tree, Mapping):
        return {key: mapped(child, leaf, (*path, key)) for key, child in tree.items()}
    if isinstance(tree, list):
        return [mapped(child, leaf, (*path, index)) for index, child in enumerate(tree)]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(mapped(child, leaf, (*path, index)) for index, child in enumerate(tree))
    return leaf(path, tree)


def dotted(path: Path) -> str:
    """The path as one key, joined by dots as DCP does."""
    return ".".join(map(str, path))


def rank_key(rank: int) -> str:
    """The key of a rank's own value where a tree has one for each."""
    return f"rank_{rank}"


def is_by_rank(tree: Tree) -> bool:
    """Whether a tree holds a value for each rank of a run: `{"rank_0": ..., "rank_1": ...}`."""
    return isinstance(tree, Mapping) and bool(tree) and set(tree) == set(map(rank_key, range(len(tree))))


def is_tensors(tree: Tree) -> bool:
    """Whether a tree is a flat, non-empty mapping of names to tensors (a model's state dict).

    Extra state is allowed, and so are objects of unknown classes (a quantized weight): they do not hide the rest.
    """
    if not isinstance(tree, Mapping) or not tree or not all(isinstance(key, str) for key in tree):
        return False
    values = [value for key, value in tree.items() if not str(key).endswith("_extra_state")]
    return any(isinstance(value, Tensor) for value in values) and all(
        isinstance(value, Tensor | Opaque) for value in values
    )


def outline(tree: Tree, limit: int = 12) -> str:
    """The top-level keys of a tree, with what is under them, in one line: for messages about unknown conventions."""
    if isinstance(tree, Mapping):
        keys = [f"{key} ({_kind(value)})" for key, value in list(tree.items())[:limit]]
        more = f", ... ({len(tree)} keys)" if len(tree) > limit else ""
        return ", ".join(keys) + more if keys else "no keys"
    return _kind(tree)


def _kind(tree: Tree) -> str:
    if isinstance(tree, Opaque):
        return f"an {tree}"
    if isinstance(tree, Mapping):
        keys = [str(key) for key in tree]
        return f"a dict of {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}" if keys else "an empty dict"
    name = type(tree).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
