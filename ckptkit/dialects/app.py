"""app: the DCP tutorial of PyTorch, one stateful object `AppState` under the key `app`.

What: `{"app": {"model": ..., "optim": ...}}`, saved by `torch.distributed.checkpoint.save`. What else the object or
the script saves stands beside them, or beside `app`.

Written: the same, with everything under `app`, in a DCP directory or (`--to full`) in one torch file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.checkpoint import Contents, State
from ..core.flat_optimizer import nested_optimizer
from ..core.tree import is_tensors
from ..errors import UsageError

NAME = "app"
_APP, _FORMATS = "app", ("dcp", "full")
_MODEL, _OPTIMIZER = ("model", "model_state_dict"), ("optim", "optimizer", "optimizer_state_dict", "optim_state_dict")
_SCHEDULERS = ("lr_scheduler", "scheduler_state_dict")


def claims(contents: Contents) -> str | None:
    tree = contents.tree
    inner = tree.get(_APP) if isinstance(tree, Mapping) else None
    if not isinstance(inner, Mapping) or _first(inner, _MODEL) is None:
        return None
    return f"key {_APP!r} with {', '.join(map(repr, inner))}"


def _first(tree: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in tree and (names is not _MODEL or is_tensors(tree[name]))), None)


def read(parts: Mapping[str, Contents]) -> State:
    contents = parts[""]
    inner = contents.tree[_APP]
    model, optimizer = _first(inner, _MODEL), _first(inner, _OPTIMIZER)
    assert model is not None, "claims() said so"
    beside = {name: value for name, value in contents.tree.items() if name != _APP}
    extras = {**beside, **{name: value for name, value in inner.items() if name not in (model, optimizer, "master")}}
    for name in _SCHEDULERS:
        if name in extras and "scheduler" not in extras:
            extras["scheduler"] = extras.pop(name)
    return State(
        model=inner[model],
        optimizer=nested_optimizer(inner[optimizer]) if optimizer else None,
        masters=inner.get("master", {}),
        extras=extras,
        warnings=contents.warnings,
        **contents.facts,
    )


def write(state: State, format: str) -> Mapping[str, Contents]:
    if format not in _FORMATS:
        raise UsageError(
            f"{NAME} is not written as {format}",
            why="its stateful object is saved by DCP or torch.save",
            hint=f"--to {' or '.join(_FORMATS)}",
        )
    inner: dict[str, Any] = {"model": dict(state.model)}
    if state.optimizer is not None:
        inner["optim"] = state.optimizer
    if state.masters:
        inner["master"] = dict(state.masters)
    inner |= state.extras
    facts = {"aliases": state.aliases, "buffers": state.buffers, "frozen": state.frozen}
    return {"": Contents(format, {_APP: inner}, f"written for {NAME}", facts=facts)}
