"""An optimizer's state dict in the flat form of `flatten_optimizer_state_dict=True`, to the nested form and back.

Source: `_flatten_optim_state_dict` in torch/distributed/checkpoint/state_dict.py (2.13). `state.<fqn>.<slot>` holds the
states and `param_groups.<fqn>.<name>` the hyper-parameters, once for each parameter: which parameters made a group is
not in it, nor is a group of equal hyper-parameters told from another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .spec import Tensor
from .tree import Tree

_STATE, _GROUPS = "state.", "param_groups."
_SMALL = 16  # elements; a learning rate that is a tensor is compared by value


def is_flat(tree: Tree) -> bool:
    """Whether a tree is an optimizer's state dict in the flat form."""
    return (
        isinstance(tree, Mapping)
        and bool(tree)
        and all(isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in tree)
    )


def is_nested(tree: Tree) -> bool:
    """Whether a tree is an optimizer's state dict in the usual, nested form."""
    return isinstance(tree, Mapping) and isinstance(tree.get("state"), Mapping) and "param_groups" in tree


def nested_optimizer(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"state": {fqn: {slot: value}}, "param_groups": [...]}` of the flat form.

    Parameters with equal hyper-parameters become one group; groups and their parameters stand in the order in which
    they first appear. The same mapping comes back where it is not flat.
    """
    if not is_flat(flat):
        return dict(flat)
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(_GROUPS):
            fqn, _, name = key.removeprefix(_GROUPS).rpartition(".")
            hyper.setdefault(fqn, {})[name] = value
    state: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(_STATE):
            fqn, slots = _split(key.removeprefix(_STATE), hyper)
            at = state.setdefault(fqn, {})
            for slot in slots[:-1]:
                at = at.setdefault(slot, {})
            at[slots[-1]] = value
    groups: dict[Any, dict[str, Any]] = {}
    for fqn, values in hyper.items():
        same = tuple((name, _by_value(value)) for name, value in sorted(values.items()))
        groups.setdefault(same, {**values, "params": []})["params"].append(fqn)
    return {"state": state, "param_groups": list(groups.values())}


def _split(key: str, known: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A key's parameter and slots: by the longest parameter that has a group; else the slot is the last part."""
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end]), parts[end:]
    return ".".join(parts[:-1]), parts[-1:]


def _by_value(value: Any) -> Any:
    """Something hashable that is equal for equal values: hyper-parameters are small."""
    if isinstance(value, Tensor):
        if value.spec.numel <= _SMALL and len(value.pieces) == 1 and value.pieces[0].box.numel == value.spec.numel:
            data = bytearray(value.spec.nbytes)
            value.pieces[0].place.read_into(0, memoryview(data))
            return "tensor", value.spec.dtype, value.spec.shape, bytes(data)
        return "tensor", id(value)
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(_by_value(child) for child in value)
    if isinstance(value, Mapping):
        return "dict", tuple((repr(key), _by_value(child)) for key, child in value.items())
    return type(value).__name__, repr(value)


def flattened_optimizer(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The flat form of a nested state dict whose parameters are named (`params` of a group hold FQNs)."""
    flat: dict[str, Any] = {}
    for fqn, slots in nested.get("state", {}).items():
        flat |= _flattened(slots, f"{_STATE}{fqn}")
    for group in nested.get("param_groups", []):
        for fqn in group["params"]:
            flat |= {f"{_GROUPS}{fqn}.{name}": value for name, value in group.items() if name != "params"}
    return flat


def _flattened(tree: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}"
        out |= _flattened(value, name) if isinstance(value, dict) else {name: value}
    return out
