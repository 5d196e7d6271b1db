"""Devices named cuda become cpu wherever tensors, modules and factories take one."""

from __future__ import annotations

import copyreg
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

REAL_DEVICE = torch.device
# Factories that take a device and are not in torch's own list, because they have a tensor to take it from.
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


def on_cpu(device: Any) -> Any:
    """`device` with cuda replaced by cpu: a device, a string, or an index of a GPU; anything else as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return REAL_DEVICE("cpu")
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    if isinstance(device, REAL_DEVICE) and device.type == "cuda":
        return REAL_DEVICE("cpu")
    return device


class _DeviceType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, REAL_DEVICE)

    def __subclasscheck__(cls, other: type) -> bool:
        return other is REAL_DEVICE or super().__subclasscheck__(other)


class _Device(metaclass=_DeviceType):
    """Stands for `torch.device`; makes real devices, none of which is a GPU."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):
            return REAL_DEVICE("cpu")
        device = REAL_DEVICE(*args, **kwargs)
        return REAL_DEVICE("cpu") if device.type == "cuda" else device


_Device.__name__ = _Device.__qualname__ = "device"
_Device.__module__ = "torch"


def answer() -> None:
    torch.device = _Device  # type: ignore[misc]
    copyreg.pickle(REAL_DEVICE, lambda device: (torch.device, (str(device),)))
    _factories()
    _methods()
    _loading()
    _generators()


def replace_everywhere(original: Any, replacement: Any, *owners: Any) -> None:
    """Puts `replacement` wherever one of `owners` holds `original` under any name."""
    for owner in owners:
        for name in [n for n, value in vars(owner).items() if value is original]:
            setattr(owner, name, replacement)


def _factories() -> None:
    """torch.zeros and its like; torch itself keeps the list of functions that take a device."""
    for original in _device_constructors():
        replace_everywhere(original, _with_cpu(original), torch, torch.fft, torch.nested, torch.sparse)
    for name in LIKE:
        setattr(torch, name, _with_cpu(getattr(torch, name)))
    torch.set_default_device = _with_cpu(torch.set_default_device)
    for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, _with_cpu(getattr(torch.Tensor, name)))


def _with_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its keyword `device` on CPU and without `pin_memory`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        if original.__name__ == "set_default_device":
            args = tuple(on_cpu(arg) for arg in args)
        return original(*args, **kwargs)

    return functools.wraps(original)(call)


def _methods() -> None:
    plain_to = torch.Tensor.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return plain_to(self, *args, **kwargs)

    plain_module_to = torch.nn.Module.to

    def module_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return plain_module_to(self, *args, **kwargs)

    plain_empty = torch.nn.Module.to_empty

    def to_empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        return plain_empty(self, device=on_cpu(device), recurse=recurse)

    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.to = functools.wraps(plain_to)(to)  # type: ignore[method-assign]
    torch.Tensor.cuda = torch.Tensor.pin_memory = same  # type: ignore[method-assign]
    torch.nn.Module.to = functools.wraps(plain_module_to)(module_to)  # type: ignore[method-assign]
    torch.nn.Module.to_empty = to_empty  # type: ignore[method-assign]
    torch.nn.Module.cuda = same  # type: ignore[method-assign]
    torch.UntypedStorage.cuda = same  # type: ignore[method-assign]


def _loading() -> None:
    plain = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {key: on_cpu(value) for key, value in map_location.items()}
        elif map_location is None or not callable(map_location):
            # A file that a GPU wrote names cuda inside; without a map it would ask for one.
            map_location = on_cpu(map_location) if map_location is not None else "cpu"
        return plain(f, map_location, *args, **kwargs)

    torch.load = functools.wraps(plain)(load)
    torch.serialization.load = torch.load


def _generators() -> None:
    plain = torch.Generator

    class Generator(plain):  # type: ignore[misc,valid-type]
        """A generator of the CPU, whatever device it is asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made: Any = plain.__new__(cls, on_cpu(device))  # type: ignore[call-arg]
            return made

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    torch.Generator = Generator  # type: ignore[misc]


def asked_by_script(depth: int = 2) -> bool:
    """Whether the function that calls this was called by the script or its modules, not by an installed library."""
    file = sys._getframe(depth).f_code.co_filename
    return not any(part in file for part in ("site-packages", "dist-packages", "/torch/", "<frozen"))
