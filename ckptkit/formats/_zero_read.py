"""A ZeRO directory as one tree: the ranks' vectors by parameter, beside what the model files hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core.box import Shape
from ..core.checkpoint import Contents, Drop
from ..core.options import ReadOptions
from ..core.spec import Tensor, TensorSpec
from ..errors import SourceError
from ._zero_extras import read_extras
from ._zero_files import OptimFile, check_models, count_of, groups_of, read_models, read_optims, scalar, shape_of
from ._zero_flat import joined
from ._zero_names import Files
from ._zero_rule import PartitionRule, round_robin
from ._zero_stage0 import read_stage0
from ._zero_units import flat_units, partition_units


class Cut(Protocol):
    """Parameters of one group whose weights and states were found together."""

    @property
    def group(self) -> int: ...

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def dealt(self) -> bool: ...

    def weights(self) -> dict[str, Tensor]: ...

    def state(self) -> dict[str, dict[str, Any]]: ...


@dataclass(slots=True)
class Read:
    """The parts of a tree while it is put together."""

    model: dict[str, Any] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    drops: list[Drop] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_files(files: Files, options: ReadOptions) -> Contents:
    """Read the files of a tag folder. Raises SourceError naming every fault."""
    models = read_models(files)
    rank0 = models.get(0) or next(iter(models.values()))
    if not files.optims and not files.partitioned:
        return read_stage0(files, rank0, options)
    if not files.optims:
        raise SourceError(
            f"{files.folder} has no optimizer files",
            why="ZeRO-3 keeps the weights in them; the model files hold empty placeholders",
            hint="restore the *_optim_states.pt files",
        )
    optims = read_optims(files)
    ordered = [optims[rank] for rank in sorted(optims)]
    ranks = count_of(ordered[0]) or len(ordered)
    check_models(files, models, ranks)
    shapes = rank0.get("param_shapes")
    if not shapes:
        raise SourceError(f"{files.models[0]} names no parameters", why="its param_shapes is empty",
                          hint="it is of a version before 0.3.16, or of a run without an optimizer")  # fmt: skip
    units: Sequence[Cut] = (partition_units if files.partitioned else flat_units)(shapes, ordered)
    read = Read()
    optimizer_parts(read, units, hyper_parameters(read, ordered[0], rank0), ranks, rank0)
    model_parts(read, units, [models[rank] for rank in sorted(models)], options)
    extras = read_extras(rank0, ordered[0].scaler)
    compare_steps(read, extras)
    version = rank0.get("ds_version") or ordered[0].tree.get("ds_version") or "of unknown version"
    kind = "BF16_Optimizer" if ordered[0].stage is None and not files.partitioned else _stage(ordered[0], files)
    return as_contents("zero", read, extras, rank0, f"{kind}, DeepSpeed {version}, {ranks} ranks", ranks)


def as_contents(
    name: str, read: Read, extras: Mapping[str, Any], model: Mapping[str, Any], evidence: str, ranks: int | None
) -> Contents:
    """The tree in its canonical form, with what the files say of names."""
    tree: dict[str, Any] = {"model": read.model}
    if read.groups or read.state:
        tree["optimizer"] = {"state": read.state, "param_groups": read.groups}
    if read.masters:
        tree["master"] = read.masters
    facts: dict[str, Any] = {"aliases": read.aliases, "drops": tuple(read.drops)}
    if model.get("buffer_names") is not None:
        facts |= {"buffers": frozenset(model["buffer_names"]), "frozen": frozenset(read.frozen)}
    return Contents(name, {**tree, **extras}, evidence, ranks, tuple(read.warnings), facts)


def hyper_parameters(read: Read, file: OptimFile, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups without their parameters. Elastic files have none; the configuration may."""
    groups = groups_of(file)
    if groups is not None:
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]
    config = model.get("ds_config")
    said = config.get("optimizer", {}).get("params", {}) if isinstance(config, Mapping) else {}
    count = len(file.tree["single_partition_of_fp32_groups"])
    rates = [_rates(model.get("lr_scheduler"), index) for index in range(count)]
    found = dict.fromkeys(said, "from ds_config") | dict.fromkeys(rates[0], "from the scheduler")
    read.warnings.append(
        "elastic checkpoint files hold no hyper-parameters: "
        + ", ".join([*(f"{key} is {where}" for key, where in found.items()), "set the others yourself"])
    )
    return [{**said, **own} for own in rates]


def _rates(scheduler: Any, index: int) -> dict[str, Any]:
    """The learning rate of a group and the one it began with, as a scheduler of torch keeps them."""
    out = {}
    for key, name in (("_last_lr", "lr"), ("base_lrs", "initial_lr")):
        values = scheduler.get(key) if isinstance(scheduler, Mapping) else None
        if isinstance(values, list | tuple) and index < len(values):
            out[name] = values[index]
    return out


def optimizer_parts(
    read: Read, units: Sequence[Cut], groups: list[dict[str, Any]], ranks: int, model: Mapping[str, Any]
) -> None:
    """Groups by name, in the order in which the optimizer got its parameters, and the state of each."""
    names: dict[int, list[str]] = {index: [] for index in range(len(groups))}
    for unit in units:
        own = list(unit.shapes)
        if unit.dealt:
            own = _unshuffled(own, ranks, model)
        names[unit.group].extend(own)
        hyper = groups[unit.group]
        for name, slots in unit.state().items():
            if slots and "step" not in slots and isinstance(hyper.get("step"), int):
                slots["step"] = hyper["step"]  # fused optimizers before 0.9 counted in the group alone
            if slots:
                read.state[name] = slots
    read.groups = [{**hyper, "params": names[index]} for index, hyper in enumerate(groups)]


def _unshuffled(names: list[str], ranks: int, model: Mapping[str, Any]) -> list[str]:
    """Undo `round_robin_gradients`, which shuffles a group for the files: by the configuration, or by the names.

    Groups are given to an optimizer in the model's order as a rule, so a list that only dealing out brings into that
    order was dealt out.
    """
    original = [""] * len(names)
    for position, index in enumerate(round_robin(len(names), ranks)):
        original[index] = names[position]
    place = {name: index for index, name in enumerate(model["module"])}
    raw = [place.get(name, -1) for name in names]
    if raw == sorted(raw):
        return names
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    said = zero.get("round_robin_gradients") if isinstance(zero, Mapping) else None
    dealt = [place.get(name, -1) for name in original]
    return original if said or (said is None and dealt == sorted(dealt)) else names


def model_parts(read: Read, units: Sequence[Cut], models: Sequence[Mapping[str, Any]], options: ReadOptions) -> None:
    """The model's tensors: trained ones from the vectors, the rest from the model files, tied names as aliases."""
    rank0 = models[0]
    module: Mapping[str, Any] = rank0["module"]
    buffers = set(rank0.get("buffer_names") or ())
    trained = {name: tensor for unit in units for name, tensor in unit.weights().items()}
    frozen = _frozen(models)
    read.aliases = _aliases(module, rank0, set(trained))
    if options.hints.model is not None:
        read.aliases |= options.hints.model.aliases
    faults = []
    for name in [*module, *(name for name in (*trained, *frozen) if name not in module)]:
        held = module.get(name)
        if name in trained:
            low = _low(held, trained[name])
            if held is not None and held.spec.shape not in (trained[name].spec.shape, (0,)):
                faults.append(f"{name}: {held.spec.shape} in the module, {trained[name].spec.shape} in param_shapes")
            read.model[name] = low
            if low.spec.dtype != trained[name].spec.dtype:
                read.masters[name] = trained[name]
        elif name in read.aliases or name in buffers or not isinstance(held, Tensor | None):
            read.model[name] = held
        else:
            read.frozen.add(name)
            shape = frozen[name].spec.shape if name in frozen else None
            if held is not None and shape in (None, held.spec.shape) and held.spec.shape != (0,):
                read.model[name] = held
            elif name in frozen:
                read.model[name] = frozen[name]
            else:
                read.drops.append(Drop(name, _NOWHERE))
    for alias, owner in read.aliases.items():
        if owner in read.model:
            read.model[alias] = read.model[owner]
    if faults:
        raise SourceError(
            "the module and the optimizer are not of one model",
            why="names or sizes of one are not in the other",
            hint="restore both files of one step",
            faults=faults,
        )


_NOWHERE = (
    "the files hold its name and no data: DeepSpeed before 0.9 wrote neither frozen parameters nor ties under ZeRO-3; "
    "if it is tied to another, --model says so"
)


def _low(held: Tensor | None, trained: Tensor) -> Tensor:
    """The weight as the model holds it: the module's own tensor, or, where that is a placeholder, its dtype."""
    if held is None or held.spec.dtype == trained.spec.dtype:
        return trained
    if held.spec.shape == trained.spec.shape and held.pieces:
        return held
    return trained.cast(held.spec.dtype)


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Parameters outside of the optimizer: whole at stage 2, a part a rank at stage 3. Older versions wrote none."""
    shapes = models[0].get("frozen_param_shapes") or {}
    out: dict[str, Tensor] = {}
    for name, said in shapes.items():
        shape = shape_of(said)
        parts = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        if parts[0] is None:
            continue
        if parts[0].spec.shape == shape:
            out[name] = parts[0]
            continue
        rule = PartitionRule.of([math.prod(shape)], len(models))
        sizes = [part.spec.numel if part is not None else 0 for part in parts]
        wrong = [rank for rank, size in enumerate(sizes) if size != rule.size]
        if wrong:
            raise SourceError(
                f"the frozen parameter {name} is not cut as its shape {shape} says",
                why="its fragments are of another world size or damaged",
                hint="restore the model files of one step",
                faults=[f"rank {rank}: {sizes[rank]} elements, not {rule.size}" for rank in wrong],
            )
        whole = joined({name: shape}, rule, parts, parts[0].spec.dtype)
        out[name] = whole[name] if math.prod(shape) else Tensor(TensorSpec(shape, parts[0].spec.dtype), ())
    return out


def _aliases(module: Mapping[str, Any], rank0: Mapping[str, Any], trained: set[str]) -> dict[str, str]:
    """Tied names: as `shared_params` says, or because two names of the module share one storage (before 0.9)."""
    out = {}
    for alias, owner in (rank0.get("shared_params") or {}).items():
        swap = alias in trained and owner not in trained
        out[owner if swap else alias] = alias if swap else owner
    same: dict[object, list[str]] = {}
    for name, held in module.items():
        if isinstance(held, Tensor) and held.storage is not None and held.spec.numel:
            same.setdefault(held.storage, []).append(name)
    for names in same.values():
        owner = next((name for name in names if name in trained), names[0])
        out |= {name: owner for name in names if name != owner and name not in out and out.get(owner) != name}
    return out


def compare_steps(read: Read, extras: Mapping[str, Any]) -> None:
    """Warn where the engine and the optimizer count differently, which has harmless reasons too."""
    steps = {slots["step"] for slots in read.state.values() if isinstance(slots.get("step"), int)}
    tensors = {id(slots["step"]): slots["step"] for slots in read.state.values() if "step" in slots}
    steps |= {int(scalar(step)) for step in tensors.values() if isinstance(step, Tensor) and step.spec.numel == 1}
    expected = extras.get("step")
    if not isinstance(expected, int) or not steps:
        return
    skipped = extras.get("skipped_steps", 0)
    expected -= skipped if isinstance(skipped, int) else 0
    if steps != {expected}:
        read.warnings.append(
            f"the engine is at step {expected}, the optimizer at {', '.join(map(str, sorted(steps)))}: DeepSpeed "
            "before 0.15 steps once before training, and an optimizer may have been started anew; "
            "else the model file is of another save"
        )


def _stage(file: OptimFile, files: Files) -> str:
    return f"ZeRO-{3 if files.partitioned else file.stage}"
