"""Watches DeepSpeed's engine, which has its own backward and step and calls torch's inside them as it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import recorder
from .around import around


def attach() -> None:
    """Called once, right after deepspeed was imported."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    active = recorder.ACTIVE
    if active is None:
        return

    def initialised(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            active.notes["broadcast"] = "yes"
            return original(self, *args, **kwargs)

        return call

    def backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            divides = kwargs.get("scale_wrt_gas", True)
            active.saw_backward(loss, float(self.gradient_accumulation_steps()) if divides else 1.0)
            return _quietly(original, self, loss, *args, **kwargs)

        return call

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if active.quiet or not self.is_gradient_accumulation_boundary():
                return _quietly(original, self, *args, **kwargs)
            optimizer = _torch_optimizer(self)
            active.note_dtype(next(self.module.parameters()).dtype)
            active.before_step(optimizer, self.module)
            active.lrs = tuple(float(rate) for rate in self.get_lr())
            result = _quietly(original, self, *args, **kwargs)
            norm = self.get_global_grad_norm()
            if norm is not None and float(norm) >= 0:
                limit = float(self.gradient_clipping())
                active.raw_norm = float(norm)
                active.applied_norm = min(active.raw_norm, limit) if limit > 0 else active.raw_norm
            active.after_step(optimizer, self.module)
            return result

        return call

    around(DeepSpeedEngine, "__init__", initialised)
    around(DeepSpeedEngine, "backward", backward)
    around(DeepSpeedEngine, "step", step)


def _torch_optimizer(engine: Any) -> Any:
    """The torch optimizer under ZeRO's and the precision wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    active = recorder.ACTIVE
    assert active is not None
    active.quiet += 1
    try:
        return function(*args, **kwargs)
    finally:
        active.quiet -= 1
