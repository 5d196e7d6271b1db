"""DeepSpeed's loss scale for fp16, as a class that is written into a migrated file."""

from __future__ import annotations

from .draft import Draft
from .ds_config import entry
from .ds_setup import Setup, constant
from .plan import Line

# deepspeed 0.19.8 runtime/fp16/loss_scaler.py `DynamicLossScaler`. The scale is changed before gradients are divided
# by it, as in zero/stage_1_and_2.py `step`: an update at which it grows divides by the new one.
SCALER = '''class LossScaler:
    """DeepSpeed's loss scale: halved by every overflow after the first ones, doubled after `window` steps without."""

    def __init__(self, scale=2.0**16, window=1000, hysteresis=2, least=1.0, refill=False, dynamic=True):
        self.cur_scale, self.scale_window, self.min_scale, self.dynamic = scale, window, least, dynamic
        self.delayed_shift = self.cur_hysteresis = hysteresis
        self.consecutive_hysteresis = refill
        self.cur_iter, self.last_overflow_iter, self.skipped = 0, -1, 0

    def scale(self, loss):
        return loss.float() * self.cur_scale

    def unscale(self, parameters):
        """Divide the gradients by the scale; False, for an update to skip, where one of any rank is not finite."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        grads = [grad.to_local() if isinstance(grad, DTENSOR) else grad for grad in grads]
        bad = TORCH.stack([(~TORCH.isfinite(grad)).any() for grad in grads]).any().float()
        DIST.all_reduce(bad, op=DIST.ReduceOp.MAX)
        overflow = bool(bad)
        self.skipped += overflow
        if self.dynamic:
            self.update(overflow)
        for grad in [] if overflow else grads:
            grad.mul_(1.0 / self.cur_scale)
        return not overflow

    def update(self, overflow):
        if overflow and self.cur_hysteresis == 1:
            if self.cur_scale == self.min_scale:
                raise RuntimeError("gradients overflow at the lowest loss scale")
            self.cur_scale = max(self.cur_scale / 2, self.min_scale)
        elif overflow:
            self.cur_hysteresis -= 1
        if overflow:
            self.last_overflow_iter = self.cur_iter
        else:
            stable = self.cur_iter - self.last_overflow_iter - 1
            grows = stable > 0 and stable % self.scale_window == 0
            if grows or self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if grows:
                self.cur_scale *= 2
        self.cur_iter += 1

    def state_dict(self):
        """The scale as torch's GradScaler names it, and all of it as DeepSpeed's does."""
        return {"scale": self.cur_scale, "deepspeed": {"kind": "DynamicLossScaler", **vars(self)}}

    def load_state_dict(self, state):
        self.cur_scale = state["scale"]
        vars(self).update({key: value for key, value in state.get("deepspeed", {}).items() if key in vars(self)})'''


def scaler_lines(draft: Draft, setup: Setup) -> list[Line]:
    """`scaler = LossScaler(...)` for an engine in fp16, with what the config says beyond the defaults."""
    if setup.precision != "fp16":
        return []
    if "LossScaler" not in draft.helpers:
        text = SCALER.replace("DTENSOR", draft.need("torch.distributed.tensor", "DTensor"))
        text = text.replace("DIST", draft.need_module("torch.distributed", "dist"))
        draft.helpers["LossScaler"] = text.replace("TORCH", draft.need_module("torch"))
    static = entry(setup.tree, "fp16.loss_scale", 0)
    power = entry(setup.tree, "fp16.initial_scale_power", 16)
    given = {"scale": f"{float(static)}" if static else f"2.0**{power}" if power != 16 else ""}
    if static:
        given["dynamic"] = "False"
    else:
        # Without ZeRO the optimizer of fp16/fused_optimizer.py keeps the scale itself, and knows no hysteresis.
        delay = 1 if setup.stage == 0 else entry(setup.tree, "fp16.hysteresis", 2)
        values = {
            "window": (entry(setup.tree, "fp16.loss_scale_window", 1000), 1000),
            "hysteresis": (delay, 2),
            "least": (entry(setup.tree, "fp16.min_loss_scale", 1), 1),
            "refill": (entry(setup.tree, "fp16.consecutive_hysteresis", False), False),
        }
        given |= {name: repr(value) for name, (value, default) in values.items() if value != default}
    arguments = ", ".join(f"{name}={text}" for name, text in given.items() if text)
    return [(f"{setup.at(setup.model, 'scaler')} = LossScaler({arguments})",)]


def unknown(setup: Setup) -> list[str]:
    """The keys of a config's fp16 that only the run tells."""
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    found = [name for name in (*names, "consecutive_hysteresis") if not constant(entry(setup.tree, f"fp16.{name}", 0))]
    return [f"fp16.{name}" for name in found] if setup.precision == "fp16" else []
