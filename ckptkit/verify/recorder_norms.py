"""The global gradient norm, in fp64, of parameters that anything may hold: DDP, FSDP1, FSDP2 or nothing.

The norms that frameworks compute for clipping are fp32 sums whose order depends on how the parameters are cut: measured
on 1.6 million elements, FSDP1 and FSDP2 answer norms 4e-5 apart for gradients that are equal to the last bit.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel


def total_norm(parameters: Iterable[torch.Tensor]) -> float | None:
    """Collective. The 2-norm of all gradients; None when there is none at all.

    Plain gradients are replicated (DDP, a single process); DTensors are summed over the mesh dimensions that shard
    them; parameters of FSDP1 hold this rank's part only, and are summed over the process group of their unit.
    """
    units = _fsdp1_groups() if dist.is_initialized() else {}
    # Every rank has to reduce over the same groups in the same order, whatever gradients it holds.
    sharded = sorted({group for group in units.values() if group is not None}, key=lambda g: g.group_name)
    sums: dict[tuple[Any, ...], float] = {(group,): 0.0 for group in sharded}
    whole, seen = 0.0, False
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        seen = True
        groups = (units[id(parameter)],) if units.get(id(parameter)) is not None else ()
        if hasattr(grad, "placements"):
            grad, groups = _local(grad)
        if groups:
            sums[groups] = sums.get(groups, 0.0) + _squares(grad)
        else:
            whole += _squares(grad)
    for groups, value in sums.items():
        whole += _reduced(value, groups)
    return whole**0.5 if seen or sums else None


def _local(grad: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """This rank's part of a DTensor, and the groups over which its parts are spread."""
    if any(placement.is_partial() for placement in grad.placements):
        return grad.full_tensor(), ()
    mesh = grad.device_mesh
    groups = tuple(mesh.get_group(dim) for dim, placement in enumerate(grad.placements) if placement.is_shard())
    return grad.to_local(), groups


def _squares(grad: torch.Tensor) -> float:
    values = grad.detach().coalesce().values() if grad.is_sparse else grad.detach()
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2 if values.numel() else 0.0


def _reduced(value: float, groups: tuple[Any, ...]) -> float:
    for group in groups:
        device = "cpu" if "gloo" in dist.get_backend(group) else "cuda"
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group)
        value = float(total)
    return value


def _fsdp1_groups() -> dict[int, Any]:
    """Process group of each parameter that FSDP1 shards, by id; None for those that it keeps whole (NO_SHARD)."""
    found: dict[int, Any] = {}
    for module in gc.get_objects():
        if type(module) is not FullyShardedDataParallel or module._handle is None:
            continue
        handle: Any = module._handle
        group = handle.process_group if handle.uses_sharded_strategy else None
        parameters = handle.flat_param._params if handle._use_orig_params else [handle.flat_param]
        found.update({id(p): group for p in parameters})
    return found
