"""A checkpoint without its bytes: tensors by key, parameter groups by name, aliases, extras, and how it was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .spec import Tensor, TensorKey, TensorSpec
from .tree import Tree


@dataclass(frozen=True, slots=True)
class Drop:
    """Something that is not carried over, and the reason."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class State:
    """A checkpoint sorted by role, with the names that its framework gave: what a dialect makes of a container.

    `model`: flat, name -> Tensor (or a plain value for `_extra_state`). `optimizer`: `{"state": {name or id: {slot:
    Tensor or plain value}}, "param_groups": [{"params": [name or id, ...], hyper-parameters...}]}`, or None.
    `masters`: name -> fp32 Tensor. `extras`: all the rest by its usual name (`scheduler`, `step`, `rng`, ...).
    `aliases`, `buffers` and `frozen` are what the files themselves know about names; None where they do not know.
    `drops` is what belongs to the checkpoint and is not in its files. `parameters` names the parameters in the order
    of the model; where it is None that order is the order of `model`, unless `ordered` is False (safetensors sorts).
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None = None
    masters: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tree] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] | None = None
    frozen: frozenset[str] | None = None
    warnings: tuple[str, ...] = ()
    drops: tuple[Drop, ...] = ()
    parameters: tuple[str, ...] | None = None
    ordered: bool = True


@dataclass(frozen=True, slots=True)
class Contents:
    """What a container holds: its tree of keys, and what its files say about themselves.

    `facts` are hints of a container that also knows meanings (ZeRO knows buffers, frozen and tied parameters): the
    fields of `State` with the same names.
    """

    format: str
    tree: Tree
    evidence: str
    world_size: int | None = None
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Names that only the model knows: every parameter (in order) and buffer with its shape, and tied names.

    `modules` are all modules by path, the model itself under "", parents before children in the order in which the
    model yields them, each with the names of its class and of that class's bases. A module that is used twice stands
    under both paths.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    frozen: frozenset[str] = frozenset()
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """Metadata of a checkpoint of any format; no tensor bytes are read until they are asked for.

    `entries` maps every key to its pieces, `tensors` to shape, dtype and role. `param_groups` name FQNs, in the order
    of the files. `optimizer_values` holds optimizer state that is no tensor (fqn -> name -> value). `aliases` maps a
    tied name to its owner; only owners have entries. `extras` holds the rest; tensors in it are `TensorRef`s.
    `drops` are things in the source that no target can hold (objects of unknown classes), `evidence` says how format
    and dialect were found.
    """

    path: str
    format: str
    dialect: str
    evidence: tuple[str, ...]
    world_size: int | None
    entries: Mapping[TensorKey, Tensor]
    param_groups: Sequence[Mapping[str, Any]] = ()
    optimizer_values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Tree] = field(default_factory=dict)
    drops: tuple[Drop, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[TensorKey, TensorSpec]:
        """Every tensor's shape, dtype and role by `TensorKey(fqn, slot)`."""
        return {key: tensor.spec for key, tensor in self.entries.items()}

    @property
    def has_optimizer(self) -> bool:
        return bool(self.param_groups) or any(tensor.spec.role == "optim" for tensor in self.entries.values())

    @property
    def step(self) -> int | None:
        """The number of optimizer steps where an extra says so, else None."""
        step = self.extras.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.spec.nbytes for tensor in self.entries.values())

    def weights(self) -> dict[str, Tensor]:
        """The model's own tensors by name: parameters, frozen parameters and buffers, tied names once."""
        return {key.fqn: tensor for key, tensor in self.entries.items() if key.slot == "value"}
