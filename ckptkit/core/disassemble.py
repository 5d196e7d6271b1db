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
    resolve = _resolve(checkpoint)
    for key, tensor in checkpoint.entries.items():
        if tensor.spec.role == "optim":
            state.setdefault(key.fqn, {})[key.slot] = tensor
    for name, slots in checkpoint.optimizer_values.items():
        state.setdefault(name, {}).update(mapped(slots, resolve))
    groups = [{**mapped(dict(group), resolve), "params": list(group["params"])} for group in checkpoint.param_groups]
    named = {"state": state, "param_groups": groups}
    if keys == "id":
        return numbered(named)
    return {
        "state": {prefix + name: slots for name, slots in state.items()},
        "param_groups": [{**group, "params": [prefix + name for name in group["params"]]} for group in groups],
    }


def numbered(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer state with integers in the place of names, counted through all groups as torch does."""
    ordered = [name for group in optimizer["param_groups"] for name in group["params"]] or list(optimizer["state"])
    ids = {name: index for index, name in enumerate(ordered)}
    return {
        "state": {ids[name]: optimizer["state"][name] for name in ordered if name in optimizer["state"]},
        "param_groups": [
            {**group, "params": [ids[name] for name in group["params"]]} for group in optimizer["param_groups"]
        ],
    }
