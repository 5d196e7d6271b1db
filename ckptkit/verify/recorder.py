"""Watches a training script from inside its process and stops it after N steps.

Recorded are losses, gradient norms, learning rates, weights and fingerprints of the batches.

A step is an optimizer step that followed a backward pass. Its loss is the sum of what was backpropagated since the last
one, so a script that divides by its micro-batches and DeepSpeed's engine, which does it for the script, report alike.
What is recorded goes to files at once, so a script that dies later has still said what it computed.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp

from . import recorder_norms, recorder_weights
from .script_hook import FOLDER
from .summary import checksum
from .trace import StepRecord, Summaries, step_to_json, summaries_to_json

STEPS = "CKPTKIT_VERIFY_STEPS"
SEED = "CKPTKIT_VERIFY_SEED"
SEED_RANKS = "CKPTKIT_VERIFY_SEED_RANKS"
DEVICE = "CKPTKIT_VERIFY_DEVICE"
PORT = "CKPTKIT_VERIFY_PORT"
STOP_IF_RANKS_DIFFER = "CKPTKIT_VERIFY_STOP_IF_RANKS_DIFFER"
LARGEST = 50_000_000  # elements; larger models are compared by losses and norms alone
WAIT_SECONDS = 60.0


@dataclass(slots=True)
class Recorder:
    """The state of the watch in one process."""

    folder: Path
    wanted: int
    losses: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    raw_norm: float | None = None
    applied_norm: float | None = None
    lrs: tuple[float, ...] = ()
    done: int = 0
    quiet: int = 0  # depth of calls whose inner backwards and steps are somebody else's business
    seeded_by_script: bool = False
    notes: dict[str, str] = field(default_factory=dict)
    named: list[tuple[str, torch.nn.Module]] = field(default_factory=list)

    def saw_backward(self, loss: torch.Tensor, scale: float = 1.0) -> None:
        """A backward pass from `loss` starts; `scale` is what a gradient scaler has multiplied it with."""
        if loss.numel() == 1:
            whole = getattr(loss.detach(), "full_tensor", loss.detach)()
            self.losses.append(float(whole) / scale)

    def before_step(self, optimizer: torch.optim.Optimizer, root: torch.nn.Module | None = None) -> None:
        """Collective. The gradients are whole and the weights are the old ones."""
        self.lrs = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        if root is None:
            self.applied_norm = recorder_norms.total_norm(p for g in optimizer.param_groups for p in g["params"])
        if self.done == 0 and self.losses:
            for group in optimizer.param_groups:
                self.note_dtype(group["params"][0].dtype if group["params"] else None)
            self.write_weights("initial", optimizer, root)

    def after_step(self, optimizer: torch.optim.Optimizer, root: torch.nn.Module | None = None) -> None:
        """Collective. Ends a step; a second optimizer that steps on the same backward passes belongs to the same."""
        if self.done == 0 and self.path("done").exists():
            self.stop()  # the script starts its processes once more; the first time was recorded
        if self.losses:
            raw = self.raw_norm if self.raw_norm is not None else self.applied_norm
            seen = "".join(self.batches) or None
            self.append(StepRecord(self.done, sum(self.losses), raw, self.lrs, self.applied_norm, seen))
            self.done += 1
        elif self.done == 0:
            return
        self.losses, self.batches, self.raw_norm, self.applied_norm = [], [], None, None
        if self.done == 1:
            self.write_weights("after_first", optimizer, root)
        if self.ranks_went_apart():
            self.notes["ranks_went_apart"] = "yes"
            if os.environ.get(STOP_IF_RANKS_DIFFER):
                self.stop()
        if self.done >= self.wanted:
            self.write_weights("final", optimizer, root)
            self.stop()

    def ranks_went_apart(self) -> bool:
        """Whether the ranks began to shard different weights and nobody made them equal."""
        return self.notes.get("ranks_start_alike") == "no" and self.notes.get("broadcast") != "yes"

    def note_dtype(self, dtype: torch.dtype | None) -> None:
        """Which low precision the script computes in, for the choice of the tolerance."""
        if dtype in (torch.bfloat16, torch.float16):
            self.notes["compute_dtype"] = "bf16" if dtype is torch.bfloat16 else "fp16"

    def append(self, record: StepRecord) -> None:
        with self.path("steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(step_to_json(record)) + "\n")
        self.path("notes.json").write_text(json.dumps(self.notes), encoding="utf-8")

    def write_weights(self, moment: str, optimizer: torch.optim.Optimizer, root: torch.nn.Module | None) -> None:
        """Collective. Summaries of the whole weights; of the optimizer states and groups after the first step."""
        root = root if root is not None else recorder_weights.root_of(optimizer)
        if root is None:
            return
        numel = recorder_weights.numel(root)
        if numel > LARGEST:
            self.notes["weights"] = f"not compared: {numel} elements a rank"
            return
        try:
            weights = recorder_weights.summaries(root)
            self.write_summaries(moment, weights)
            if moment == "after_first":
                self.write_summaries("optimizer_first", recorder_weights.states(root, optimizer))
                groups = recorder_weights.groups(root, optimizer)
                self.path("groups.json").write_text(json.dumps(groups, default=str), encoding="utf-8")
        except Exception as error:  # never break the script that is watched: its losses are the main thing
            self.notes["weights"] = f"not compared {moment}: {type(error).__name__}: {error}"

    def write_summaries(self, name: str, summaries: Summaries) -> None:
        if rank() == 0:
            self.path(f"{name}.json").write_text(json.dumps(summaries_to_json(summaries)), encoding="utf-8")

    def path(self, name: str) -> Path:
        return self.folder / f"rank{rank()}.{name}"

    def stop(self) -> None:
        """Ends this process once every rank has made its steps, so that no rank waits for one that left."""
        self.path("notes.json").write_text(json.dumps(self.notes), encoding="utf-8")
        self.path("done").touch()
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until and len(list(self.folder.glob("rank*.done"))) < world_size():
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


ACTIVE: Recorder | None = None


def start() -> None:
    """Called once per process, right after torch was imported."""
    global ACTIVE
    recorder = ACTIVE = Recorder(Path(os.environ[FOLDER]), int(os.environ[STEPS]))
    if os.environ.get(DEVICE) == "cpu":
        from . import cpu

        cpu.answer()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    _seed(recorder)
    _watch_backward(recorder)
    _watch_optimizers(recorder)
    _watch_scalers(recorder)
    _watch_clipping(recorder)
    _watch_batches(recorder)
    _watch_wrappers(recorder)
    _redirect_rendezvous()


def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `make(original)` in the place of `owner.name`."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _seed(recorder: Recorder) -> None:
    """Seeds what the script leaves unseeded: torch, random, numpy, the same for both scripts.

    Ranks get different seeds, because unseeded ranks differ in life and a missing broadcast must show. Scripts that
    rely on equal ranks without making them equal are run with one seed for the weights (SEED_RANKS=same) instead;
    then the ranks part when the first optimizer is made, so that their random batches differ all the same.
    """
    base = int(os.environ[SEED])
    together = os.environ.get(SEED_RANKS) == "same"

    def seed_all(value: int) -> None:
        random.seed(value)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(value % 2**32)
        manual_seed(value)

    manual_seed = torch.manual_seed
    first = int(os.environ.get("RANK", "0"))
    seed_all(base if together else base + first)

    def seen(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.seeded_by_script = True
            return original(*args, **kwargs)

        return call

    around(torch, "manual_seed", seen)
    around(torch.random, "manual_seed", seen)

    def with_group(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            # Processes of mp.spawn learn their rank here; torchrun's knew it from the start and may have drawn since.
            if not recorder.seeded_by_script and not together and "RANK" not in os.environ:
                seed_all(base + rank())
            return result

        return call

    around(dist, "init_process_group", with_group)

    def with_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            if together and not recorder.seeded_by_script and not recorder.notes.get("parted"):
                recorder.notes["parted"] = "yes"
                seed_all(base + 1000 + rank())

        return call

    around(torch.optim.Optimizer, "__init__", with_optimizer)


def _redirect_rendezvous() -> None:
    """Scripts that write a port into MASTER_PORT would collide with their other launch, and with anybody else's."""
    if PORT not in os.environ:
        return

    def moved(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ[PORT]
            if str(kwargs.get("init_method") or "").startswith("tcp://"):
                kwargs["init_method"] = f"tcp://127.0.0.1:{os.environ[PORT]}"
            return original(*args, **kwargs)

        return call

    around(dist, "init_process_group", moved)


def _watch_backward(recorder: Recorder) -> None:
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


def _watch_optimizers(recorder: Recorder) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if recorder.quiet == 0:
            recorder.before_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if recorder.quiet == 0:
            recorder.after_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _watch_scalers(recorder: Recorder) -> None:
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


def _watch_clipping(recorder: Recorder) -> None:
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


def _watch_batches(recorder: Recorder) -> None:
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


def _watch_wrappers(recorder: Recorder) -> None:
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
