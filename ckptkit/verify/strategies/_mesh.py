"""Device meshes over all ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh_of(device: str, *, hybrid: bool) -> DeviceMesh:
    """A line of all ranks, or a grid of (replicate, shard) with the fewest replicas that leave two or more to shard.

    FSDP1 over a shard group of one rank takes itself for NO_SHARD and then reduces over that one rank alone: the
    replicas drift apart without a word (torch 2.13). A prime number of ranks therefore has one replica.
    """
    world = dist.get_world_size()
    if not hybrid:
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    replicas = next((n for n in range(2, world // 2 + 1) if world % n == 0), 1)
    return init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
