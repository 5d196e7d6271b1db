"""What `torch.cuda`, `torch.accelerator` and the cuda side of `torch.amp` answer on CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .cpu_tensors import REAL_DEVICE, asked_by_script, on_cpu

WORLD = "CKPTKIT_VERIFY_WORLD"  # how many GPUs the script is told that there are
GIB = 1 << 30
# What only steers or measures the hardware.
NOTHING = (
    "set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_accumulated_memory_stats", "set_per_process_memory_fraction", "init",
    "set_sync_debug_mode", "manual_seed", "manual_seed_all", "set_stream", "seed", "seed_all",
)  # fmt: skip
NUMBERS = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "utilization",
)  # fmt: skip


def answer() -> None:
    cuda: Any = torch.cuda
    for name in NOTHING:
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in NUMBERS:
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.is_available = _if_script(lambda: True, cuda.is_available)
    cuda.is_initialized = _if_script(lambda: True, cuda.is_initialized)
    cuda.device_count = _if_script(lambda: int(os.environ.get(WORLD, "1")), cuda.device_count)
    cuda.current_device = lambda: int(os.environ.get("LOCAL_RANK", "0"))
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_name = lambda *args: "CPU"
    cuda.get_device_capability = lambda *args: (8, 0)
    cuda.get_device_properties = lambda *args: SimpleNamespace(
        name="CPU", total_memory=GIB, major=8, minor=0, multi_processor_count=1
    )
    cuda.mem_get_info = lambda *args: (GIB, GIB)
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.memory_summary = lambda *args, **kwargs: ""
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args: None
    cuda.get_rng_state_all = list
    cuda.set_rng_state_all = lambda states: None
    cuda.device = cuda.device_of = _nothing_within
    cuda.stream = cuda.StreamContext = _nothing_within
    cuda.Stream = cuda.ExternalStream = _Stream
    cuda.Event = _Event
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = lambda *args, **kwargs: None
    cuda.nvtx.range = _nothing_within
    cuda.memory._record_memory_history = cuda.memory._dump_snapshot = lambda *args, **kwargs: None
    _accelerator()
    _amp()
    _compile()


def _if_script(told: Callable[[], Any], truth: Callable[[], Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return told() if asked_by_script() else truth(*args)

    return call


@contextlib.contextmanager
def _nothing_within(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Stream:
    """A stream that is always done."""

    device = REAL_DEVICE("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None: ...


class _Event:
    """An event that happens when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3

    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True


def _accelerator() -> None:
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    accelerator.is_available = _if_script(lambda: True, accelerator.is_available)
    accelerator.device_count = _if_script(lambda: int(os.environ.get(WORLD, "1")), accelerator.device_count)
    truth = accelerator.current_accelerator

    def current(*args: Any, **kwargs: Any) -> Any:
        return REAL_DEVICE("cpu") if asked_by_script() else truth(*args, **kwargs)

    accelerator.current_accelerator = current
    accelerator.current_device_index = lambda: int(os.environ.get("LOCAL_RANK", "0"))
    accelerator.set_device_index = accelerator.set_device_idx = accelerator.synchronize = lambda *args: None


def _amp() -> None:
    """autocast and gradient scalers for cuda work for cpu, with cuda's default of fp16."""
    autocast = torch.amp.autocast
    plain = autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if on_cpu(device_type) != device_type:
            dtype = dtype if dtype is not None else torch.float16
        plain(self, on_cpu(device_type), dtype, enabled, cache_enabled)

    autocast.__init__ = functools.wraps(plain)(init)  # type: ignore[method-assign]
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        original = getattr(torch, name)
        setattr(torch, name, functools.partial(_first_on_cpu, original))

    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        scaler.__init__ = _scaler_on_cpu(scaler.__init__)  # type: ignore[method-assign]


def _first_on_cpu(original: Callable[..., Any], *args: Any) -> Any:
    return original(*(on_cpu(arg) if isinstance(arg, str) else arg for arg in args))


def _scaler_on_cpu(plain: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        plain(self, on_cpu(device), *args, **kwargs)

    return functools.wraps(plain)(init)


def _compile() -> None:
    """torch.compile traces and then runs eagerly: the same numbers without a minute of code generation."""
    plain, plain_module = torch.compile, torch.nn.Module.compile

    def compile(model: Any = None, **kwargs: Any) -> Any:
        eager = {k: v for k, v in kwargs.items() if k not in ("mode", "options", "backend")}
        return plain(model, backend="eager", **eager)

    def compile_module(self: Any, *args: Any, **kwargs: Any) -> None:
        eager = {k: v for k, v in kwargs.items() if k not in ("mode", "options", "backend")}
        plain_module(self, *args, backend="eager", **eager)

    torch.compile = functools.wraps(plain)(compile)
    torch.nn.Module.compile = compile_module  # type: ignore[method-assign]
