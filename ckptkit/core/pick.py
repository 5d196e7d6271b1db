"""One model and its optimizer out of a tree that holds several: a GAN's, a student's and its teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from .tree import Tree, is_tensors, outline


def pick(tree: Tree, model_key: str | None, optimizer_key: str | None) -> Tree:
    """The tree with the model at `model_key` as "model" and the optimizer at `optimizer_key` as "optimizer".

    Keys are names joined by dots (`networks.generator`). Everything else stays and becomes an extra; what stood under
    "model" or "optimizer" before keeps its name with an underscore. Raises UsageError for a key that is not there.
    """
    chosen = {}
    for role, key in (("model", model_key), ("optimizer", optimizer_key)):
        if key is not None:
            chosen[role], tree = _taken(tree, key, role)
    assert isinstance(tree, Mapping)
    rest = {f"{name}_" if name in chosen else name: value for name, value in tree.items()}
    return {**chosen, **rest}


def _taken(tree: Tree, key: str, role: str) -> tuple[Tree, Tree]:
    """What lies at a key, and the tree without it."""
    name, _, below = key.partition(".")
    if isinstance(tree, Mapping) and key in tree:
        name, below = key, ""
    if not isinstance(tree, Mapping) or name not in tree:
        raise UsageError(
            f"--{role}-key: there is no {name!r}", why=f"it saw {outline(tree)}", hint="names are joined by dots"
        )
    if below:
        found, less = _taken(tree[name], below, role)
    else:
        found, less = tree[name], None
        if not _fits(found, role):
            raise UsageError(
                f"--{role}-key: what lies at {name!r} is not the state of a {role}",
                why=f"it saw {outline(found)}",
                hint="a model is a dict of tensors, an optimizer has state and param_groups",
            )
    rest: dict[Any, Any] = {k: v for k, v in tree.items() if k != name}
    return found, {**rest, name: less} if less else rest


def _fits(found: Tree, role: str) -> bool:
    if role == "model":
        return is_tensors(found)
    return isinstance(found, Mapping) and ("state" in found or "param_groups" in found)
