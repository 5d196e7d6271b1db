"""Process groups, meshes and wrappers that a script makes for NCCL and cuda, made for gloo and cpu instead."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .around import around
from .cpu_cuda import WORLD
from .cpu_tensors import on_cpu, replace_everywhere

CPU = torch.device("cpu")


def answer() -> None:
    _groups()
    _averages()
    _meshes()
    _ddp()
    _fsdp1()
    _fsdp2()


def _groups() -> None:
    def gloo(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            kwargs.pop("pg_options", None)
            return original("gloo", *args, **kwargs)

        return call

    def new_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # new_group(ranks, timeout, backend, ...)
            kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            kwargs.pop("pg_options", None)
            return original(*args[:2], **kwargs)

        return call

    def plain_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_ids", None)
            return original(*args, **kwargs)

        return call

    around(dist, "init_process_group", gloo)
    around(dist, "new_group", new_gloo)
    around(dist, "barrier", plain_barrier)
    dist.is_nccl_available = lambda: True


def _averages() -> None:
    """gloo has no average: it is a sum and a division."""

    def averaged(original: Callable[..., Any], which: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            op = kwargs.get("op", args[which] if len(args) > which else None)
            if op != dist.ReduceOp.AVG:
                return original(*args, **kwargs)
            args = tuple(dist.ReduceOp.SUM if i == which else arg for i, arg in enumerate(args))
            if "op" in kwargs:
                kwargs["op"] = dist.ReduceOp.SUM
            later = kwargs.pop("async_op", False)
            original(*args, **kwargs)
            target = args[0] if args else next(kwargs[k] for k in ("tensor", "output") if k in kwargs)
            target.div_(dist.get_world_size(kwargs.get("group")))
            return _Done() if later else None

        return call

    around(dist, "all_reduce", lambda original: averaged(original, 1))
    around(dist, "reduce", lambda original: averaged(original, 2))
    around(dist, "reduce_scatter_tensor", lambda original: averaged(original, 2))


class _Done:
    """The handle of a collective that is over."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _meshes() -> None:
    plain = dist.device_mesh.init_device_mesh

    def init(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return plain(on_cpu(device_type), *args, **kwargs)

    import torch.distributed.tensor as tensor

    replace_everywhere(plain, init, dist, dist.device_mesh, tensor)

    def mesh(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            original(self, on_cpu(device_type), *args, **kwargs)

        return call

    around(DeviceMesh, "__init__", mesh)


def _ddp() -> None:
    def no_ids(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
        ) -> None:
            original(self, module, None, None, *args, **kw)

        return call

    around(DistributedDataParallel, "__init__", no_ids)


def _fsdp1() -> None:
    """FSDP1 runs on CPU when it is given the device; four of its options do not (torch 2.13).

    `sync_module_states` is refused and therefore done here; CPU offload pins memory; state dict configurations with
    `offload_to_cpu=True` crash or give wrong values, and there is nothing to offload. HYBRID_SHARD shards within a node
    of `torch.cpu.device_count()` devices, which is one: it turns itself into NO_SHARD within one rank and never reduces
    a gradient over the others. A node has here as many devices as ranks.
    """
    torch.cpu.device_count = lambda: int(os.environ.get(WORLD, "1"))

    signature = inspect.signature(fsdp.FullyShardedDataParallel.__init__)

    def on_this_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            if given.pop("sync_module_states", False):
                _broadcast(given["module"], given.get("process_group"))
            original(**{**given, "device_id": CPU, "cpu_offload": None})

        return call

    around(fsdp.FullyShardedDataParallel, "__init__", on_this_cpu)
    for config in (
        fsdp.FullStateDictConfig, fsdp.ShardedStateDictConfig, fsdp.LocalStateDictConfig, fsdp.FullOptimStateDictConfig,
        fsdp.ShardedOptimStateDictConfig, fsdp.LocalOptimStateDictConfig,
    ):  # fmt: skip
        around(config, "__init__", _not_offloaded)
    around(fsdp.FullyShardedDataParallel, "summon_full_params", _not_offloaded)


def _not_offloaded(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **{**kwargs, "offload_to_cpu": False} if "offload_to_cpu" in kwargs else kwargs)
        if args and hasattr(args[0], "offload_to_cpu"):
            args[0].offload_to_cpu = False
        return result

    return call


def _broadcast(module: torch.nn.Module, group: Any) -> None:
    """Collective. Rank 0's parameters and buffers to everybody, as sync_module_states does."""
    group = group[0] if isinstance(group, tuple) else group
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_meta:
            tensor.data = torch.empty_like(tensor, device=CPU)
        dist.broadcast(tensor.detach(), source, group=group)


def _fsdp2() -> None:
    def unpinned(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, pin_memory: bool = True) -> None:
            original(self, pin_memory=False)

        return call

    around(fsdp.CPUOffloadPolicy, "__init__", unpinned)
