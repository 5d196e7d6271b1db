"""Load a checkpoint of any format into a live model of any strategy: each rank reads the boxes that it owns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.fqn import common_prefix
from ..core.gather import Arena, gather
from ..core.spec import Tensor, TensorKey
from ..core.transform import renamed, same_value
from ..errors import LossError, SourceError
from ..io.move import dtype_name, move
from ..opened import OpenCheckpoint, read_tensor
from ..opening import open as open_checkpoint
from .adapt import adapt
from .collective import together
from .holder import Holder, Live, local_of


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded: the kind of model, the step, how many tensors and bytes this rank read, and what is left over.

    `extras` are those that were not restored here (RNG, data loader, ...), their tensors read: the script's to use.
    """

    kind: str
    step: int | None
    tensors: int
    nbytes: int
    extras: Mapping[str, Any]
    warnings: tuple[str, ...]


def load(
    path: str | os.PathLike[str] | OpenCheckpoint,
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    format: str = "auto",
    dialect: str = "auto",
    param_names: Sequence[str] | None = None,
    factory: str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Load weights, optimizer state, groups' hyper-parameters and the scheduler in place. Call it on every rank.

    `model` is a plain module, DDP, FSDP1, FSDP2 (materialized) or a DeepSpeed engine, at any world size; `optimizer` is
    made from its parameters (for an engine: none, it has its own). Each rank reads only what it owns, in bounded
    memory. `factory` (`pkg.mod:factory`) and `param_names` are as `model` and `param_names` of `open`. With
    `strict=False` names that only one side has are left alone.

    Raises SourceError (missing tensors, other shapes, all named), LossError where parts of one flat parameter disagree
    on the step or groups on hyper-parameters, UsageError for an optimizer that is not of this model.
    """
    checkpoint = (
        path
        if isinstance(path, OpenCheckpoint)
        else open_checkpoint(path, format, dialect, param_names=param_names, model=factory)
    )
    live = adapt(model, optimizer)
    checkpoint = _with_prefix(checkpoint, live)
    _check(checkpoint, live, strict)
    groups = _group_values(checkpoint, live) if live.optimizer is not None and checkpoint.has_optimizer else []
    loader = _Loader(checkpoint)

    def fill() -> None:
        with torch.no_grad():
            for holder in [*live.values, *live.masters]:
                loader.weights(holder)
            if live.optimizer is not None and checkpoint.has_optimizer:
                for holder in live.trained:
                    loader.states(holder, live.optimizer)
                for group, given in groups:
                    group |= {key: _live_value(group.get(key), checkpoint, value) for key, value in given.items()}

    # Ranks of a sharded model read different boxes, so one may fail alone; a plain model may be loaded on rank 0 only.
    fill() if live.kind == "plain" else together(fill)
    live.finish()
    return LoadReport(
        live.kind,
        checkpoint.step,
        loader.tensors,
        loader.nbytes,
        _load_extras(checkpoint, live, scheduler),
        checkpoint.warnings,
    )


def _check(checkpoint: OpenCheckpoint, live: Live, strict: bool) -> None:
    shapes = {share.fqn: share.shape for holder in live.values for share in holder.shares}
    weights = checkpoint.weights()
    faults = []
    for fqn, shape in shapes.items():
        stored = weights.get(checkpoint.aliases.get(fqn, fqn))
        if stored is None:
            faults += [f"{fqn} is not in the checkpoint"] if strict else []
        elif stored.spec.shape != shape:
            faults.append(f"{fqn}: the model has {list(shape)}, the checkpoint {list(stored.spec.shape)}")
    if strict:
        known = set(shapes) | set(live.aliases)
        faults += [f"{fqn} is not in the model" for fqn in weights if fqn not in known]
    if faults:
        raise SourceError(
            f"the checkpoint does not fit the model: {len(faults)} tensors",
            why="names or shapes differ",
            hint="convert --rename brings names together; strict=False leaves names alone that only one side has",
            faults=faults[:40],
        )


def _with_prefix(checkpoint: OpenCheckpoint, live: Live) -> OpenCheckpoint:
    """A model all of whose names begin with `module.` is taken for a wrapped one in a file; this one knows better."""
    names = {share.fqn for holder in live.values for share in holder.shares}
    prefix = common_prefix(names)
    stored = {key.fqn for key in checkpoint.entries if key.slot == "value"}
    if prefix and not names & stored and {prefix + name for name in stored} & names:
        return renamed(checkpoint, lambda name: prefix + name)
    return checkpoint


class _Loader:
    """Fills holders, and counts what it read."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._entries = checkpoint.entries
        self._arena = Arena()
        self._slots: dict[str, list[str]] = {name: [] for name in checkpoint.optimizer_values}
        for key, tensor in self._entries.items():
            if tensor.spec.role == "optim":
                self._slots.setdefault(key.fqn, []).append(key.slot)
        self.tensors = 0
        self.nbytes = 0

    def weights(self, holder: Holder) -> None:
        """Masters where the checkpoint has them: a narrower weight is their rounding."""
        for share in holder.shares:
            owner = self._checkpoint.aliases.get(share.fqn, share.fqn)
            stored = self._entries.get(TensorKey(owner, "master")) or self._entries.get(TensorKey(owner))
            if stored is not None:
                for box, view in share.views(holder.local):
                    self._fill(stored, box, view)

    def _fill(self, stored: Tensor, box: Any, view: torch.Tensor) -> None:
        dtype = dtype_name(view.dtype)
        self.tensors += 1
        for block, data in gather(stored, box, dtype, move, arena=self._arena):
            part = torch.frombuffer(data, dtype=view.dtype) if len(data) else torch.empty(0, dtype=view.dtype)
            view[block.within(box)].copy_(part.view(block.sizes))
            self.nbytes += len(data)

    def states(self, holder: Holder, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's state of one holder: tensors like its own are filled box by box, a step is set once."""
        shares = [share for share in holder.shares if share.fqn in self._slots]
        old = optimizer.state.get(holder.key, {})
        # FSDP1 and ZeRO step only what a rank holds; FSDP2 steps empty shards too, and all ranks save one step.
        if not shares or not (isinstance(holder.key, DTensor) or any(share.boxes for share in shares)):
            optimizer.state.pop(holder.key, None)
            return
        state: dict[str, Any] = {}
        for slot in self._common_slots(shares):
            parts = [(share, self._entries[TensorKey(share.fqn, slot)]) for share in shares]
            if all(stored.spec.shape == share.shape and share.shape for share, stored in parts):
                state[slot] = torch.zeros_like(holder.key, memory_format=torch.preserve_format)
                local = local_of(state[slot])
                for share, stored in parts:
                    for box, view in share.views(local):
                        self._fill(stored, box, view)
            else:
                state[slot] = self._single(slot, parts, holder)
                if isinstance(old.get(slot), int):  # DeepSpeed's CPU Adam counts in Python
                    state[slot] = int(state[slot])
        for share in shares:
            state |= self._checkpoint.optimizer_value(share.fqn)
        optimizer.state[holder.key] = state

    def _common_slots(self, shares: Sequence[Any]) -> list[str]:
        slots = [self._slots[share.fqn] for share in shares]
        if any(set(each) != set(slots[0]) for each in slots):
            raise LossError(
                "parameters of one flat tensor have different optimizer states",
                why="a flat parameter or partition has one state for all of them",
                hint="load into FSDP2, or into ZeRO groups that keep such parameters apart",
                faults=[f"{share.fqn}: {', '.join(each)}" for share, each in zip(shares, slots, strict=True)][:20],
            )
        return slots[0]

    def _single(self, slot: str, parts: Sequence[tuple[Any, Tensor]], holder: Holder) -> torch.Tensor:
        """A state that is not of the parameter's shape: the step, or factors that only a whole parameter can have."""
        values = [read_tensor(stored) for _, stored in parts]
        if any(not torch.equal(value, values[0]) for value in values) or (values[0].dim() and len(values) > 1):
            raise LossError(
                f"the {slot} of parameters that share one flat tensor differs",
                why="the optimizer keeps one for all of them",
                hint="load into FSDP2 or DDP, whose parameters have states of their own",
                faults=[f"{share.fqn}: {v.tolist()}" for (share, _), v in zip(parts, values, strict=True)][:20],
            )
        return values[0] if slot == "step" else values[0].to(holder.local.device)


def _group_values(checkpoint: OpenCheckpoint, live: Live) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each live group with the hyper-parameters it will get. Raises LossError before anything is written."""
    saved = {name: group for group in checkpoint.param_groups for name in group["params"]}
    found = []
    for group, names in live.groups:
        given: dict[str, Any] = {}
        sources = [saved[checkpoint.aliases.get(name, name)] for name in names if name in saved]
        for key in {key for source in sources for key in source if key != "params"}:
            values = [source.get(key) for source in sources]
            if any(not same_value(value, values[0]) for value in values):
                raise LossError(
                    f"the checkpoint has several values of {key} for the parameters of one group of the optimizer",
                    why=f"among them {values[0]!r} and {next(v for v in values if not same_value(v, values[0]))!r}",
                    hint="make the optimizer with the groups of the checkpoint (ckptkit inspect shows them)",
                )
            given[key] = values[0]
        found.append((group, given))
    return found


def _live_value(current: Any, checkpoint: OpenCheckpoint, value: Any) -> Any:
    key = getattr(value, "key", None)
    value = read_tensor(checkpoint.entries[key]) if isinstance(key, TensorKey) else value
    if isinstance(current, torch.Tensor):  # a learning rate that is a tensor stays the same object
        return current.fill_(float(value))
    return tuple(value) if isinstance(current, tuple) else value


def _load_extras(checkpoint: OpenCheckpoint, live: Live, scheduler: Any) -> dict[str, Any]:
    left = {}
    for name in checkpoint.extras:
        value = checkpoint.extra(name)
        target = scheduler if scheduler is not None else live.scheduler
        if name == "scheduler" and target is not None:
            target.load_state_dict(value)
        elif name in live.counters and isinstance(value, int):
            setattr(*live.counters[name], value)
        elif name != "step":
            left[name] = value
    return left
