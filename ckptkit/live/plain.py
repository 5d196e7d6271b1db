"""plain: a module whose parameters are whole on every rank: a single process, DDP, or anything that is not sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .holder import Holder, Live, named_groups, whole_share
from .names import module_names


def matches(model: nn.Module) -> bool:
    """Any module: asked last."""
    return True


def adapt(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Live:
    names = module_names(model)
    holders = [Holder(p.detach(), (whole_share(fqn, tuple(p.shape)),), p) for fqn, p in names.parameters.items()]
    by_id = {id(p): [fqn] for fqn, p in names.parameters.items()}
    return Live(
        "plain",
        [*holders, *buffer_holders(names.buffers)],
        [holder for holder in holders if holder.key.requires_grad],
        optimizer=optimizer,
        groups=named_groups(optimizer, by_id),
        aliases=names.aliases,
        buffers=frozenset(names.buffers),
        frozen=names.frozen,
    )


def buffer_holders(buffers: dict[str, torch.Tensor]) -> list[Holder]:
    """Buffers are whole on every rank under every strategy."""
    return [Holder(_data(buffer), (whole_share(fqn, tuple(buffer.shape)),)) for fqn, buffer in buffers.items()]


def _data(buffer: Any) -> torch.Tensor:
    return buffer.detach()
