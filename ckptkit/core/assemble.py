"""Assemble a checkpoint from a state sorted by role: clean names, tied weights, optimizer ids, groups, extras."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import AmbiguousError, SourceError
from .box import Shape
from .checkpoint import Drop, ModelFacts, State
from .dtype import is_float
from .fqn import clean, common_prefix
from .param_ids import match_ids, named_ids, shape_of_state
from .place import Constant
from .spec import Tensor, TensorKey
from .tree import Opaque, TensorRef, Tree, mapped

_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Hints:
    """What a person says of the model: its parameters in order (`--param-names`), or the model itself (`--model`)."""

    param_names: tuple[str, ...] | None = None
    model: ModelFacts | None = None


@dataclass(slots=True)
class Assembled:
    """The parts of a `Checkpoint` that come from its state."""

    entries: dict[TensorKey, Tensor] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    optimizer_values: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Tree] = field(default_factory=dict)
    drops: list[Drop] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    prefix: str = ""  # what wrappers had put before every name, taken off


def assemble(state: State, hints: Hints | None = None) -> Assembled:
    """Bring a state to canonical names.

    Raises SourceError where two names become one, or the optimizer does not fit the model; AmbiguousError where ids
    admit two readings.
    """
    hints = hints or Hints()
    out = Assembled(drops=list(state.drops), warnings=list(state.warnings))
    prefix = _prefix([clean(name) for name in state.model], hints)
    out.prefix = prefix
    renamed = _renamed(state.model, prefix)
    model = {name: value for name, value in renamed.items() if isinstance(value, Tensor)}
    extra_state = {name: value for name, value in renamed.items() if not isinstance(value, Tensor)}
    out.aliases = _aliases(model, state, hints, prefix)
    weights = {name: tensor for name, tensor in model.items() if name not in out.aliases}
    optimizer = _named_optimizer(state, weights, out.aliases, hints, prefix)
    _add_weights(out, weights, optimizer, state, hints, prefix)
    for name, tensor in _renamed(state.masters, prefix).items():
        out.entries[TensorKey(out.aliases.get(name, name), "master")] = tensor
    if optimizer is not None:
        _add_optimizer(out, optimizer, weights)
    extras = {**state.extras, **({"model_extra_state": extra_state} if extra_state else {})}
    out.extras = {name: _extra(out, name, tree) for name, tree in extras.items()}
    out.extras = {name: tree for name, tree in out.extras.items() if tree is not _GONE}
    return out


def _prefix(names: Sequence[str], hints: Hints) -> str:
    """The wrappers' prefix that all names carry; a known model says how much of it is its own (`self.module = ...`)."""
    prefix = common_prefix(names)
    while hints.model is not None and prefix:
        if any(name.removeprefix(prefix) in hints.model.parameters for name in names):
            break
        prefix = prefix.rpartition(".")[0].rpartition(".")[0]
        prefix += "." if prefix else ""
    return prefix


def _strip(name: str, prefix: str) -> str:
    return clean(name).removeprefix(prefix)


def _as_in_model(names: Iterable[str], weights: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Names from beside the model: with the wrapper's prefix, or without (`module.` may be a module of the model)."""
    cleaned = [clean(name) for name in names]
    return cleaned if set(cleaned) <= set(weights) else [name.removeprefix(prefix) for name in cleaned]


def _renamed(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    clashes = []
    for name, value in tree.items():
        new = _strip(name, prefix)
        if new in out:
            clashes.append(f"{name} and another name both become {new}")
        out[new] = value
    if clashes:
        raise SourceError(
            "two tensors have one name once wrapper prefixes are taken off",
            why="the file holds both a wrapped model and a plain one",
            hint="save the state dict of one of them",
            faults=clashes,
        )
    return out


def _aliases(model: Mapping[str, Tensor], state: State, hints: Hints, prefix: str) -> dict[str, str]:
    """Tied names: as the files or the model say, or because two names share one storage."""
    said = {_strip(a, prefix): _strip(b, prefix) for a, b in state.aliases.items()}
    if hints.model is not None:
        said |= dict(hints.model.aliases)
    out = {alias: owner for alias in said if (owner := _owner(alias, said)) in model and owner != alias}
    untied = [
        f"{alias} is {model[alias].spec.shape}, {owner} is {model[owner].spec.shape}"
        for alias, owner in out.items()
        if alias in model and model[alias].spec.shape != model[owner].spec.shape
    ]
    if untied:
        raise SourceError(
            "names that are said to be tied have different shapes",
            why="they cannot be one tensor",
            hint="--model names another model, or the files are not of one checkpoint",
            faults=untied,
        )
    owners: dict[object, str] = {}
    for name, tensor in model.items():
        if tensor.storage is None or name in out or 0 in tensor.spec.shape:
            continue
        owner = owners.setdefault(tensor.storage, name)
        if owner != name:
            out[name] = owner
    return out


def _owner(alias: str, said: Mapping[str, str]) -> str:
    """The end of a chain of ties; where a chain runs in a circle, the name it is entered by."""
    seen = [alias]
    while (after := said.get(seen[-1])) is not None:
        if after in seen:
            return min(seen[seen.index(after) :])
        seen.append(after)
    return seen[-1]


@dataclass(slots=True)
class _Optimizer:
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


def _named_optimizer(
    state: State, weights: Mapping[str, Tensor], aliases: Mapping[str, str], hints: Hints, prefix: str
) -> _Optimizer | None:
    if state.optimizer is None:
        return None
    raw_state = dict(state.optimizer.get("state", {}))
    raw_groups = [dict(group) for group in state.optimizer.get("param_groups", [])]
    keys = [key for group in raw_groups for key in group.get("params", [])] or list(raw_state)
    if keys and all(_is_id(key) for key in keys):
        raw_state = {int(key): value for key, value in raw_state.items() if _is_id(key)}
        for group in raw_groups:
            group["params"] = [int(key) for key in group.get("params", [])]
        # Without groups the states stand for one; a parameter that has none is not among them.
        ids = raw_groups or [{"params": sorted(raw_state)}]
        names: Mapping[Any, str] = _names_of_ids(raw_state, ids, weights, state, hints, prefix)
        homeless = sorted(set(raw_state) - set(names))
        if homeless:
            raise SourceError(
                f"the optimizer has states of {len(homeless)} ids that no group names",
                why="its state and its param_groups are not of one optimizer",
                hint="save optimizer.state_dict() again, both parts at once",
                faults=[f"id {key}" for key in homeless[:20]],
            )
    else:
        said = dict.fromkeys([*keys, *raw_state])
        names = dict(zip(said, _as_in_model(map(str, said), weights, prefix), strict=True))
        names = {key: aliases.get(name, name) for key, name in names.items()}
    strangers = sorted({name for name in names.values() if name not in weights})
    if strangers:
        raise SourceError(
            f"the optimizer names {len(strangers)} parameters that the model does not have",
            why="model and optimizer are not of one checkpoint, or their names differ by a prefix",
            hint="--rename REGEX=... or --strip-prefix brings them together",
            faults=strangers[:20],
        )
    for group in raw_groups:
        group["params"] = [names[key] for key in group.get("params", [])]
        group.pop("param_names", None)
    return _Optimizer({names[key]: dict(value) for key, value in raw_state.items()}, raw_groups)


def _is_id(key: object) -> bool:
    return (isinstance(key, int) and not isinstance(key, bool)) or (isinstance(key, str) and key.isdecimal())


def _names_of_ids(
    raw_state: Mapping[int, Any],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    state: State,
    hints: Hints,
    prefix: str,
) -> dict[int, str]:
    ids = [list(group["params"]) for group in groups]
    if ids and all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        # torch >= 2.6 notes the names where the optimizer was made from named_parameters().
        said = _as_in_model((str(name) for group in groups for name in group["param_names"]), weights, prefix)
        if set(said) <= set(weights):
            return named_ids(ids, said)
    shapes = {
        key: shape
        for key, slots in raw_state.items()
        if (shape := shape_of_state({slot: v.spec.shape for slot, v in slots.items() if isinstance(v, Tensor)}))
    }
    if hints.param_names is not None:
        names = _as_in_model(hints.param_names, weights, prefix)
        if len(names) == sum(map(len, ids)):
            return _checked(named_ids(ids, names), shapes, weights)
        return match_ids(ids, shapes, {name: weights[name].spec.shape for name in names if name in weights})
    candidates = {name: tensor for name, tensor in weights.items() if _can_be_parameter(name, tensor, weights)}
    if state.parameters is not None:
        candidates = {name: weights[name] for name in (_strip(n, prefix) for n in state.parameters) if name in weights}
    elif hints.model is None and not state.ordered:
        raise AmbiguousError(
            "the optimizer numbers its parameters, and the files do not say in which order the model has them",
            why="safetensors files are sorted by name, not by the model",
            hint="--model pkg.mod:factory or --param-names FILE says it",
        )
    if hints.model is not None:
        trained = [name for name in hints.model.parameters if name not in hints.model.frozen and name in weights]
        if len(trained) != sum(map(len, ids)):
            trained = [name for name in hints.model.parameters if name in weights]
        candidates = {name: weights[name] for name in trained}
    if state.buffers is not None:
        known = {_strip(name, prefix) for name in state.buffers}
        candidates = {name: tensor for name, tensor in candidates.items() if name not in known}
    return match_ids(ids, shapes, {name: tensor.spec.shape for name, tensor in candidates.items()})


def _checked(names: dict[int, str], shapes: Mapping[int, Shape], weights: Mapping[str, Tensor]) -> dict[int, str]:
    faults = [
        f"id {key}: its state has shape {shapes[key]}, {name!r} has {weights[name].spec.shape}"
        for key, name in names.items()
        if key in shapes and name in weights and weights[name].spec.shape != shapes[key]
    ]
    if faults:
        raise SourceError(
            "the parameter names given do not fit the optimizer's shapes",
            why="their order is another one",
            hint="give them in the order in which the optimizer got them, group after group",
            faults=faults,
        )
    return names


def _can_be_parameter(name: str, tensor: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of the model may be a trained parameter: floating point, and no BatchNorm statistic."""
    if not is_float(tensor.spec.dtype):
        return False
    module, _, leaf = name.rpartition(".")
    dot = "." if module else ""
    return not (leaf in _BATCH_NORM and all(f"{module}{dot}{part}" in weights for part in _BATCH_NORM[:2]))


def _add_weights(
    out: Assembled,
    weights: Mapping[str, Tensor],
    optimizer: _Optimizer | None,
    state: State,
    hints: Hints,
    prefix: str,
) -> None:
    trained = {name for group in optimizer.groups for name in group["params"]} if optimizer else None
    if optimizer and not optimizer.groups:
        trained = set(optimizer.state)
    buffers = {_strip(name, prefix) for name in state.buffers} if state.buffers is not None else None
    frozen = {_strip(name, prefix) for name in state.frozen} if state.frozen is not None else set()
    if hints.model is not None:
        buffers = set(hints.model.buffers)
        frozen |= set(hints.model.frozen)
    for name, tensor in weights.items():
        out.entries[TensorKey(name)] = tensor.with_role(_role(name, tensor, weights, trained, buffers, frozen))


def _role(
    name: str,
    tensor: Tensor,
    weights: Mapping[str, Tensor],
    trained: set[str] | None,
    buffers: set[str] | None,
    frozen: set[str],
) -> Any:
    if trained is not None and name in trained:
        return "param"
    if buffers is not None:
        if name in buffers:
            return "buffer"
        return "frozen" if name in frozen or trained is not None else "param"
    if name in frozen:
        return "frozen"
    if not _can_be_parameter(name, tensor, weights):
        return "buffer"
    if trained is None:
        return "param"
    return "buffer" if not tensor.spec.shape else "frozen"


def _add_optimizer(out: Assembled, optimizer: _Optimizer, weights: Mapping[str, Tensor]) -> None:
    for name, slots in optimizer.state.items():
        for slot, value in slots.items():
            if slot == "step" and isinstance(value, int | float) and not isinstance(value, bool):
                # torch before 1.12 kept the step as a Python number; its own loader makes a float32 tensor of it.
                value = _constant_step(value)
            if isinstance(value, Tensor):
                out.entries[TensorKey(name, slot)] = value.with_role("optim")
            elif isinstance(value, Opaque):
                out.drops.append(Drop(f"optimizer state {slot} of {name}", f"{value} cannot be carried"))
            else:
                nested = _nested_state(out, name, slot, value)
                out.optimizer_values.setdefault(name, {})[slot] = nested
        _warn_shared(out, name, slots)
    for index, group in enumerate(optimizer.groups):
        kept: dict[str, Any] = {}
        for key, value in group.items():
            kept[key] = _extra(out, f"param_groups.{index}.{key}", value) if key != "params" else value
        out.param_groups.append({key: value for key, value in kept.items() if value is not _GONE})


def _nested_state(out: Assembled, name: str, slot: str, tree: Tree) -> Tree:
    """A state that is no tensor, but may hold some: SOAP's and Shampoo's lists of preconditioners, LBFGS's history."""

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        where = ".".join(map(str, (slot, *path)))
        if isinstance(value, Tensor):
            out.entries[TensorKey(name, where)] = value.with_role("extra")
            return TensorRef(TensorKey(name, where))
        if isinstance(value, Opaque):
            out.drops.append(Drop(f"optimizer state {where} of {name}", f"{value} cannot be carried"))
            return None
        return value

    return mapped(tree, leaf)


def _warn_shared(out: Assembled, name: str, slots: Mapping[str, Any]) -> None:
    seen: dict[object, str] = {}
    for slot, value in slots.items():
        if isinstance(value, Tensor) and value.storage is not None and value.spec.shape:
            twin = seen.setdefault(value.storage, slot)
            if twin != slot:
                out.warnings.append(
                    f"{twin} and {slot} of {name} are one tensor in the file: FSDP1 on CPU with offload_to_cpu=True "
                    "writes such files, and the first of the two is lost in them"
                )


def _constant_step(value: float) -> Tensor:
    return Tensor.at(Constant(struct.pack("<f", float(value))), (), "float32", "optim")


_GONE: Any = object()


def _extra(out: Assembled, name: str, tree: Tree) -> Tree:
    """An extra with its tensors moved to the entries; objects of unknown classes become drops, alone if nested."""
    lost: list[tuple[Any, ...]] = []

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, Tensor):
            key = TensorKey(".".join(map(str, (name, *path))), "extra")
            out.entries[key] = value.with_role("extra")
            return TensorRef(key)
        if isinstance(value, Opaque):
            lost.append(path)
            where = ".".join(map(str, (name, *path)))
            out.drops.append(Drop(where, f"it is an {value}, which is not imported here"))
            return _GONE
        return value

    kept = mapped(tree, leaf)
    return _without_gone(kept) if lost else kept


def _without_gone(tree: Tree) -> Tree:
    if isinstance(tree, Mapping):
        return {key: _without_gone(value) for key, value in tree.items() if value is not _GONE}
    if isinstance(tree, list | tuple):
        return type(tree)(_without_gone(value) if value is not _GONE else None for value in tree)
    return tree
