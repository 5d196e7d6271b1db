"""What there is to write, sorted by ZeRO's own terms: groups of trained parameters, their states, and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.box import Shape
from ..core.checkpoint import Contents, Drop
from ..core.options import WriteOptions
from ..core.spec import Tensor, TensorKey
from ..core.tree import Tree, walk
from ..errors import UsageError
from ._zero_config import Config
from ._zero_files import scalar
from ._zero_rule import round_robin

_ROLES = ("model", "optimizer", "master")
_LOW = ("bfloat16", "float16")
_SCALAR_REFUSED = "DeepSpeed's ZeRO takes no parameters without dimensions"


@dataclass(slots=True)
class Group:
    """A parameter group: hyper-parameters, names in the order of the files, and its states by slot.

    `cut` are the states of the parameters' shapes (slot -> name -> Tensor; a name may be absent: zeros), `shared` what
    one group has one of: the step, other scalars, plain values.
    """

    hyper: dict[str, Any]
    names: list[str]
    cut: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Source:
    """Everything that the files will hold.

    `weights` are the tensors that the optimizer works on, `states` its states by parameter, `low` the dtype that the
    model computes in; `implied` are tensors that the files hold without bytes of their own.
    """

    module: dict[str, Any]
    weights: dict[str, Tensor]
    groups: list[Group]
    states: Mapping[str, Mapping[str, Any]]
    low: str
    buffers: list[str]
    frozen: dict[str, Tensor]
    aliases: dict[str, str]
    extras: dict[str, Tree]
    step: int
    implied: list[Tensor] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def shapes(self, names: Sequence[str]) -> dict[str, Shape]:
        return {name: self.weights[name].spec.shape for name in names}


def sort(contents: Contents, options: WriteOptions, config: Config) -> Source:
    """Sort a tree in its canonical form. Raises UsageError where its precision is not the configuration's."""
    tree = contents.tree
    module: dict[str, Any] = dict(tree["model"])
    masters: Mapping[str, Tensor] = tree.get("master", {})
    aliases = {alias: owner for alias, owner in (contents.facts.get("aliases") or {}).items() if owner in module}
    aliases |= _same_object(module, aliases)
    buffers = [name for name in module if name in (contents.facts.get("buffers") or ())]
    optimizer = tree.get("optimizer")
    known = [name for name, held in module.items() if isinstance(held, Tensor) and name not in aliases]
    stays = set(buffers) | set(contents.facts.get("frozen") or ())
    if options.hints.model is not None:
        stays |= options.hints.model.frozen
    groups = _groups(optimizer, [name for name in known if name not in stays], stays)
    trained = [name for group in groups for name in group.names]
    weights = {name: masters.get(name, module[name]) for name in trained}
    states: Mapping[str, Mapping[str, Any]] = (optimizer or {}).get("state", {})
    source = Source(
        module=module,
        weights=weights,
        groups=groups,
        states=states,
        low=_low(module, masters, trained, config),
        buffers=buffers,
        frozen={name: module[name] for name in known if name not in weights and name not in buffers},
        aliases=aliases,
        extras={name: value for name, value in tree.items() if name not in _ROLES},
        step=0,
    )
    if not config.whole:
        _without_scalars(source)
    for group in source.groups if not config.whole else ():
        _sort_states(source, group, {name: states.get(name, {}) for name in group.names})
        if config.round_robin:
            group.names = [group.names[index] for index in round_robin(len(group.names), config.ranks)]
    source.groups = [group for group in source.groups if group.names]  # the engine takes empty groups out
    source.step = _step(source)
    if not states:
        source.warnings.append(
            "there is no optimizer state: load with load_optimizer_states=False, into an engine whose optimizer has "
            + ("the same groups" if optimizer else "all trained parameters in one group, in the model's order")
        )
    if "scheduler" not in source.extras:
        source.warnings.append(
            "there is no scheduler state: an engine with a scheduler needs load_lr_scheduler_states=False"
        )
    return source


def _same_object(module: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, str]:
    owners: dict[int, str] = {}
    for name, held in module.items():
        if isinstance(held, Tensor) and name not in aliases:
            owners.setdefault(id(held), name)
    return {
        name: owner
        for name, held in module.items()
        if isinstance(held, Tensor) and name not in aliases and (owner := owners[id(held)]) != name
    }


def _groups(optimizer: Mapping[str, Any] | None, trained: list[str], stays: set[str]) -> list[Group]:
    groups = list((optimizer or {}).get("param_groups", []))
    if not groups:
        return [Group({}, trained)]
    return [
        Group(
            {key: value for key, value in group.items() if key != "params"},
            [name for name in group["params"] if name not in stays],
        )
        for group in groups
    ]


def _low(module: Mapping[str, Any], masters: Mapping[str, Tensor], trained: Sequence[str], config: Config) -> str:
    """The dtype that the model computes in: that of the weights beside masters, or of weights that are all narrow."""
    found = {module[name].spec.dtype for name in (masters or trained) if name in module}
    if masters and len(found & set(_LOW)) > 1:
        raise UsageError(
            "the weights beside the masters are of several dtypes",
            why="an engine trains in one",
            hint="--dtype bf16, fp16 or fp32",
        )
    low = found.pop() if len(found) == 1 else "float32"
    low = low if low in _LOW else "float32"
    if config.low is not None and config.low != low:
        raise UsageError(
            f"the configuration trains in {config.low}, the weights to be written are {low}",
            why="the engine would not load them",
            hint=f"add --dtype {config.low}",
        )
    return low


def _without_scalars(source: Source) -> None:
    for group in source.groups:
        for name in [name for name in group.names if not source.weights[name].spec.shape]:
            group.names.remove(name)
            source.drops.append(Drop(f"optimizer.{name}", _SCALAR_REFUSED))
            source.frozen[name] = source.module[name]
            del source.weights[name]


def _sort_states(source: Source, group: Group, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Tell what is cut with the parameters from what the group has one of; the rest cannot be held."""
    for slot in dict.fromkeys(slot for slots in states.values() for slot in slots):
        values = {name: slots[slot] for name, slots in states.items() if slot in slots}
        shaped = {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and slot != "step" and value.spec.shape == source.weights[name].spec.shape
        }
        if len(shaped) == len(values):
            group.cut[slot] = shaped
        elif not shaped and all(map(_is_single, values.values())):
            _share(source, group, slot, values)
        else:
            source.drops += [
                Drop(str(TensorKey(name, slot)), "ZeRO keeps optimizer states of the parameter's own shape only")
                for name in values
            ]
    without = [name for name, slots in states.items() if not slots]
    if without and group.cut:
        source.warnings.append(
            f"{len(without)} parameters have no optimizer state ({without[0]}, ...): ZeRO keeps one step for a whole "
            "group, and zeros are written for them. If they are frozen, --model says so"
        )


def _is_single(value: Any) -> bool:
    """Whether a state is one number (or a plain value), of which a group can have one: no list of tensors, say."""
    if isinstance(value, Tensor):
        return value.spec.numel == 1
    return not any(isinstance(leaf, Tensor) for _, leaf in walk(value))


def _share(source: Source, group: Group, slot: str, values: Mapping[str, Any]) -> None:
    """One value for the group: the most common one where parameters differ, and a drop for each that is lost."""
    plain = {name: scalar(value) if isinstance(value, Tensor) else value for name, value in values.items()}
    counts: dict[str, list[str]] = {}
    for name, value in plain.items():
        counts.setdefault(repr(value), []).append(name)
    chosen = max(counts.values(), key=len)
    group.shared[slot] = values[chosen[0]]
    source.implied += [value for name in chosen if isinstance(value := values[name], Tensor)]
    for names in counts.values():
        if names is not chosen:
            reason = f"ZeRO keeps one {slot} for a group: {plain[chosen[0]]}, where this one is {plain[names[0]]}"
            source.drops += [Drop(str(TensorKey(name, slot)), reason) for name in names]


def _step(source: Source) -> int:
    """Steps of the run: as an extra says, else as the optimizer counts."""
    said = source.extras.get("step")
    if isinstance(said, int) and not isinstance(said, bool):
        return said
    counted = [slots["step"] for slots in source.states.values() if "step" in slots][:1]
    numbers = [scalar(step) if isinstance(step, Tensor) else step for step in counted]
    return int(max(numbers, default=0))
