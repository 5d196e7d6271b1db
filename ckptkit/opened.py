"""What `ckptkit.open` returns: a checkpoint's metadata, and tensors read when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from .core.assemble import Assembled
from .core.box import whole
from .core.checkpoint import Checkpoint
from .core.gather import gather
from .core.spec import Tensor, TensorKey
from .core.tree import TensorRef, mapped
from .io.move import move, torch_dtype


@dataclass(frozen=True)
class OpenCheckpoint(Checkpoint):
    """A `Checkpoint` that can read its tensors."""

    def read(self, fqn: str, slot: str = "value") -> torch.Tensor:
        """The whole tensor, on the CPU, in its own dtype. A tied name reads its owner.

        `slot`: `value`, `master` (the value where the run has no separate masters), `exp_avg`, `step`, ...
        Raises KeyError naming what there is instead, SourceError where the files do not hold it.
        """
        owner = self.aliases.get(fqn, fqn)
        key = TensorKey(owner, slot)
        if key not in self.entries and slot == "master":
            key = TensorKey(owner)
        if key not in self.entries:
            slots = sorted(k.slot for k in self.entries if k.fqn == owner)
            raise KeyError(f"{fqn} has no {slot}" + (f", only {', '.join(slots)}" if slots else " and no other tensor"))
        return read_tensor(self.entries[key])

    def extra(self, name: str) -> Any:
        """An extra with its tensors read, where `extras[name]` has references."""
        return self._with_tensors(self.extras[name])

    def optimizer_value(self, fqn: str) -> dict[str, Any]:
        """A parameter's states that are no tensors, with the tensors that they hold read."""
        return dict(self._with_tensors(self.optimizer_values.get(fqn, {})))

    def _with_tensors(self, tree: Any) -> Any:
        return mapped(
            tree, lambda path, leaf: read_tensor(self.entries[leaf.key]) if isinstance(leaf, TensorRef) else leaf
        )


def read_tensor(tensor: Tensor) -> torch.Tensor:
    """A whole tensor in memory."""
    spec = tensor.spec
    out = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    flat, at = out.reshape(-1).view(torch.uint8) if spec.numel else out.reshape(-1), 0
    for _, view in gather(tensor, whole(spec.shape), spec.dtype, move):
        flat[at : at + len(view)] = torch.frombuffer(view, dtype=torch.uint8)
        at += len(view)
    return out


def opened(base: Checkpoint) -> OpenCheckpoint:
    """The same checkpoint, readable."""
    return OpenCheckpoint(**{field.name: getattr(base, field.name) for field in fields(Checkpoint)})


def as_checkpoint(
    assembled: Assembled, *, path: str, format: str, dialect: str, evidence: tuple[str, ...], world_size: int | None
) -> OpenCheckpoint:
    """Put what was assembled and how it was found into one object."""
    return OpenCheckpoint(
        path=path,
        format=format,
        dialect=dialect,
        evidence=evidence,
        world_size=world_size,
        entries=assembled.entries,
        param_groups=assembled.param_groups,
        optimizer_values=assembled.optimizer_values,
        aliases=assembled.aliases,
        extras=assembled.extras,
        drops=tuple(assembled.drops),
        warnings=tuple(dict.fromkeys(assembled.warnings)),
    )
