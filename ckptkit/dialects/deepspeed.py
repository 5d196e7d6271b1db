"""deepspeed: what DeepSpeed's engine keeps, native or universal; the containers know the meaning of their own keys.

Both containers give `{"model": ..., "optimizer": ..., "master": ..., extras...}` and say themselves which names are
buffers, frozen or tied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.checkpoint import Contents, State
from ..errors import UsageError

NAME = "deepspeed"
_FORMATS = ("zero", "universal")
_ROLES = ("model", "optimizer", "master")


def claims(contents: Contents) -> str | None:
    return contents.evidence if contents.format in _FORMATS else None


def read(parts: Mapping[str, Contents]) -> State:
    (contents,) = parts.values()
    tree = contents.tree
    return State(
        model=tree["model"],
        optimizer=tree.get("optimizer"),
        masters=tree.get("master", {}),
        extras={name: value for name, value in tree.items() if name not in _ROLES},
        warnings=contents.warnings,
        **contents.facts,
    )


def write(state: State, format: str) -> Mapping[str, Contents]:
    if format not in _FORMATS:
        raise UsageError(
            f"DeepSpeed writes no {format} checkpoints",
            why="its engine loads native and universal checkpoints alone",
            hint="--to zero1, zero2, zero3 or universal; or leave --dialect out",
        )
    tree: dict[str, Any] = {"model": state.model}
    if state.optimizer is not None:
        tree["optimizer"] = state.optimizer
    if state.masters:
        tree["master"] = state.masters
    facts = {"aliases": state.aliases, "buffers": state.buffers, "frozen": state.frozen}
    return {"": Contents(format, {**tree, **state.extras}, "written by ckptkit", facts=facts)}
