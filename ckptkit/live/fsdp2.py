"""fsdp2: a module on `fully_shard`: parameters are DTensors, on one or several mesh dimensions."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.box import Box, Shape, whole
from ..errors import UsageError
from .holder import Holder, Live, Share, local_of, named_groups
from .names import module_names
from .plain import buffer_holders


def matches(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def adapt(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Live:
    names = module_names(model)
    holders = []
    for fqn, parameter in names.parameters.items():
        if not isinstance(parameter, DTensor) and parameter.is_meta:
            raise UsageError(
                f"{fqn} is on the meta device",
                why="there is no memory to load into",
                hint="model.to_empty(device=...) before loading",
            )
        shares = (Share(fqn, tuple(parameter.shape), _boxes(parameter)),)
        holders.append(Holder(local_of(parameter), shares, parameter))
    by_id = {id(parameter): [fqn] for fqn, parameter in names.parameters.items()}
    return Live(
        "fsdp2",
        [*holders, *buffer_holders(names.buffers)],
        [holder for holder in holders if holder.key.requires_grad],
        optimizer=optimizer,
        groups=named_groups(optimizer, by_id),
        aliases=names.aliases,
        buffers=frozenset(names.buffers),
        frozen=names.frozen,
    )


def _boxes(parameter: torch.Tensor) -> tuple[Box, ...]:
    """The box of this rank's part: none where the rank holds nothing of it."""
    if not isinstance(parameter, DTensor):
        return (whole(parameter.shape),)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return _box(tuple(sizes), tuple(offsets))


def _box(sizes: Shape, offsets: Shape) -> tuple[Box, ...]:
    return () if 0 in sizes else (Box(offsets, sizes),)
