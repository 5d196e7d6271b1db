"""The places in torch at which the recorder looks: backward, optimizers, scalers, clipping, loaders, wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp

from . import recorder_norms
from .around import around
from .recorder import Recorder, world_size
from .summary import checksum


def watch(recorder: Recorder) -> None:
    """Once per process."""
    watch_backward(recorder)
    watch_optimizers(recorder)
    watch_scalers(recorder)
    watch_clipping(recorder)
    watch_batches(recorder)
    watch_wrappers(recorder)


def watch_backward(recorder: Recorder) -> None:
    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.quiet == 0:
                for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors):
                    recorder.saw_backward(tensor, getattr(tensor, "_ckptkit_scale", 1.0))
            recorder.quiet += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                recorder.quiet -= 1

        return call

    around(torch.autograd, "backward", watched)  # Tensor.backward calls it by this name


def watch_optimizers(recorder: Recorder) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if recorder.quiet == 0:
            recorder.before_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if recorder.quiet == 0:
            recorder.after_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def watch_scalers(recorder: Recorder) -> None:
    """Losses multiplied by a gradient scaler are recorded as they were before; skipped steps count as steps."""

    def scaled(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, outputs: Any) -> Any:
            result = original(self, outputs)
            if isinstance(result, torch.Tensor) and self.is_enabled() and not hasattr(result, "_ckptkit_scale"):
                result._ckptkit_scale = float(self.get_scale())  # type: ignore[attr-defined]
            return result

        return call

    def stepped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = recorder.done
            result = original(self, optimizer, *args, **kwargs)
            if recorder.done == before and recorder.losses:  # infinities: the optimizer was not called
                recorder.applied_norm = recorder.raw_norm = None
                recorder.after_step(optimizer)
            return result

        return call

    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    around(torch.amp.GradScaler, "scale", scaled)
    around(ShardedGradScaler, "scale", scaled)  # overrides it
    around(torch.amp.GradScaler, "step", stepped)


def watch_clipping(recorder: Recorder) -> None:
    """The norm before the first clip of a step; what the optimizer gets is measured again when it steps."""

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            whole_model = isinstance(parameters, torch.nn.Module)  # FSDP1's method
            if not whole_model and not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)  # may be a generator, and is read twice
            if recorder.quiet == 0 and recorder.raw_norm is None:
                held = parameters.parameters() if whole_model else parameters
                recorder.raw_norm = recorder_norms.total_norm([held] if isinstance(held, torch.Tensor) else held)
            return original(parameters, *args, **kwargs)

        return call

    around(torch.nn.utils, "clip_grad_norm_", watched)
    around(torch.nn.utils.clip_grad, "clip_grad_norm_", watched)
    around(fsdp.FullyShardedDataParallel, "clip_grad_norm_", watched)


def watch_batches(recorder: Recorder) -> None:
    """Fingerprints of what data loaders hand out, so that another order of the data is seen as such."""
    from torch.utils._pytree import tree_leaves
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any) -> Any:
            batch = original(self)
            leaves = [
                leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
            ]
            recorder.batches.append("".join(checksum(leaf.cpu())[:8] for leaf in leaves))
            return batch

        return call

    around(_BaseDataLoaderIter, "__next__", watched)


def watch_wrappers(recorder: Recorder) -> None:
    """Notes who makes the ranks' weights equal, and whether they were equal when sharding began."""
    from torch.nn.parallel import DistributedDataParallel

    def broadcasts(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            recorder.notes["broadcast"] = "yes"
            return original(self, module, *args, **kwargs)

        return call

    def looks(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            _note_ranks(recorder, module)
            recorder.note_dtype(getattr(kwargs.get("mp_policy"), "param_dtype", None))
            return original(module, *args, **kwargs)

        return call

    def looks_inside(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("sync_module_states"):
                recorder.notes["broadcast"] = "yes"
            else:
                _note_ranks(recorder, module)
            recorder.note_dtype(getattr(kwargs.get("mixed_precision"), "param_dtype", None))
            return original(self, module, *args, **kwargs)

        return call

    def autocasts(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any) -> Any:
            recorder.note_dtype(self.fast_dtype if self._enabled else None)
            return original(self)

        return call

    around(torch.amp.autocast, "__enter__", autocasts)
    around(DistributedDataParallel, "__init__", broadcasts)
    around(fsdp.FullyShardedDataParallel, "__init__", looks_inside)
    import torch.distributed._composable.fsdp as old_home
    import torch.distributed.fsdp._fully_shard as home
    import torch.distributed.fsdp._fully_shard._fully_shard as source

    watched = functools.wraps(fsdp.fully_shard)(looks(fsdp.fully_shard))
    for owner in (fsdp, home, source, old_home):
        owner.fully_shard = watched  # type: ignore[attr-defined]


def _note_ranks(recorder: Recorder, module: Any) -> None:
    """Collective until the ranks are seen to differ, or were looked at eight times."""
    looked = int(recorder.notes.get("looked", "0"))
    if not dist.is_initialized() or world_size() == 1 or looked >= 8 or recorder.notes.get("ranks_start_alike") == "no":
        return
    modules = module if isinstance(module, list | tuple) else [module]
    plain = [
        p for m in modules for p in m.parameters()
        if not p.is_meta and not hasattr(p, "full_tensor") and not hasattr(p, "_fqns") and p.numel()
    ]  # fmt: skip
    recorder.notes["looked"] = str(looked + 1)
    mine = "".join(checksum(p.detach().cpu()) for p in plain[:64])
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, mine)
    recorder.notes["ranks_start_alike"] = "yes" if len(set(everyone)) == 1 else "no"
