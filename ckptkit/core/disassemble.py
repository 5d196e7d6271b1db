"""The mirror of `assemble`: a checkpoint as a state sorted by role, ready for a dialect to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .checkpoint import Checkpoint, State
from .tree import TensorRef, mapped


def disassemble(checkpoint: Checkpoint, *, optimizer_keys: Literal["fqn", "id"] = "fqn", prefix: str = "") -> State:
    """A state with tied names as the same `Tensor` object under both names, in the order of the entries.

    With `optimizer_keys="id"` parameters are numbered through all groups, as `torch.optim.Optimizer.state_dict` does.
    `prefix` (`module.` for DDP) goes before the model's names, and before the optimizer's where it names parameters.
    """
    values = checkpoint.weights()
    owners: dict[str, list[str]] = {}
    for alias, owner in checkpoint.aliases.items():
        owners.setdefault(owner, []).append(alias)
    model: dict[str, Any] = {}
    for name, tensor in values.items():
        for each in (name, *owners.get(name, ())):
            model[prefix + each] = tensor
    extras = {name: mapped(tree, _resolve(checkpoint)) for name, tree in checkpoint.extras.items()}
    model |= {prefix + name: value for name, value in extras.pop("model_extra_state", {}).items()}
    roles = {key.fqn: tensor.spec.role for key, tensor in checkpoint.entries.items() if key.slot == "value"}
    return State(
        model=model,
        optimizer=_optimizer(checkpoint, optimizer_keys, prefix),
        masters={prefix + key.fqn: t for key, t in checkpoint.entries.items() if key.slot == "master"},
        extras=extras,
        aliases={prefix + alias: prefix + owner for alias, owner in checkpoint.aliases.items()},
        buffers=frozenset(prefix + name for name, role in roles.items() if role == "buffer"),
        frozen=frozenset(prefix + name for name, role in roles.items() if role == "frozen"),
        warnings=checkpoint.warnings,
    )


def _resolve(checkpoint: Checkpoint) -> Any:
    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        return checkpoint.entries[value.key] if isinstance(value, TensorRef) else value

    return leaf


def _optimizer(checkpoint: Checkpoint, keys: str, prefix: str) -> dict[str, Any] | None:
    if not checkpoint.has_optimizer:
        return None
    state: dict[str, dict[str, Any]] = {}
    for key, tensor in checkpoint.entries.items():
        if tensor.spec.role == "optim":
            state.setdefault(key.fqn, {})[key.slot] = tensor
    for name, slots in checkpoint.optimizer_values.items():
        state.setdefault(name, {}).update(slots)
    groups = [dict(group) for group in checkpoint.param_groups]
    names: Mapping[str, Any]
    if keys == "id":
        ordered = [name for group in groups for name in group["params"]] or list(state)
        names = {name: index for index, name in enumerate(ordered)}
    else:
        named = [*state, *(name for group in groups for name in group["params"])]
        names = {name: prefix + name for name in named}
    resolve = _resolve(checkpoint)
    return {
        "state": {names[name]: slots for name, slots in sorted(state.items(), key=lambda item: _rank(names[item[0]]))},
        "param_groups": [
            {**mapped(group, resolve), "params": [names[name] for name in group["params"]]} for group in groups
        ],
    }


def _rank(key: Any) -> Any:
    return key if isinstance(key, int) else 0
