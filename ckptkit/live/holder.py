"""Holders: which boxes of which parameters lie in one tensor of this rank and in the states laid out like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.box import Box, Shape, boxes_of_run, whole
from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class Share:
    """One parameter's part of a local tensor: `boxes` packed one after another from element `start` of it.

    `start` is None where the local tensor as a whole is the one box, in its own strides.
    """

    fqn: str
    shape: Shape
    boxes: tuple[Box, ...]
    start: int | None = None

    def views(self, local: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Each box with the memory of `local` (laid out like the holder's own tensor) that holds it."""
        if self.start is None:
            for box in self.boxes:
                yield box, local.view(box.sizes)
            return
        flat, at = local.view(-1), self.start
        for box in self.boxes:
            yield box, flat[at : at + box.numel].view(box.sizes)
            at += box.numel


def whole_share(fqn: str, shape: Shape) -> Share:
    """A parameter that a local tensor holds whole."""
    return Share(fqn, shape, (whole(shape),))


def run_share(fqn: str, shape: Shape, begin: int, end: int, start: int) -> Share:
    """The flat elements `[begin, end)` of a parameter, at element `start` of a local tensor."""
    return Share(fqn, shape, tuple(boxes_of_run(shape, begin, end)), start)


@dataclass(frozen=True, slots=True)
class Holder:
    """A local tensor, the parts of parameters in it, and the key under which the optimizer keeps its state."""

    local: torch.Tensor
    shares: tuple[Share, ...]
    key: Any = None


@dataclass(slots=True)
class Live:
    """What a rank holds of a model and its optimizer.

    `values` hold weights and buffers as the model uses them, `masters` the fp32 weights of the optimizer where they are
    other tensors (else empty), `optimizer` is the innermost `torch.optim.Optimizer` or None, and `trained` are the
    holders that its states belong to. `groups` are its parameter groups, each with the FQNs of its parameters. `finish`
    brings what hangs on the weights up to date after a load. `counters` are set by a load and saved: name of the extra
    -> (object, attribute).
    """

    kind: str
    values: Sequence[Holder]
    trained: Sequence[Holder] = ()
    masters: Sequence[Holder] = ()
    optimizer: torch.optim.Optimizer | None = None
    groups: Sequence[tuple[dict[str, Any], list[str]]] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    scheduler: Any = None
    counters: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    finish: Callable[[], None] = lambda: None


def named_groups(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, Sequence[str]]
) -> list[tuple[dict[str, Any], list[str]]]:
    """The groups of an optimizer with the FQNs behind each entry, given by `id`. Raises UsageError for a stranger."""
    if optimizer is None:
        return []
    strangers = [entry for group in optimizer.param_groups for entry in group["params"] if id(entry) not in names]
    if strangers:
        raise UsageError(
            f"{len(strangers)} parameters of the optimizer are not the model's",
            why="it was made before the model was sharded, or for another model",
            hint="make the optimizer from the parameters of the sharded model",
        )
    return [(group, [fqn for entry in group["params"] for fqn in names[id(entry)]]) for group in optimizer.param_groups]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return (to_local() if to_local is not None else tensor).detach()
