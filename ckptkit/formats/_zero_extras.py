"""What is neither tensor nor group: step, scheduler, loss scaler, client state; in and out of DeepSpeed's files.

What describes the files themselves (`ds_config`, `ds_version`, `dp_world_size`, paddings, slice mappings, gradient
clipping) is no extra: it is made anew for every target, from the target's own configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.tree import Tree

# Keys of a model file that the engine itself writes (`_common_checkpoint_state`, runtime/engine.py, 0.8 to 0.19).
ENGINE_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size "
    "checkpoint_parallel_dimensions ds_config ds_version sparse_tensor_module_names csr_tensor_module_names "
    "num_experts ds_autoep_layers autoep_layers folding".split()
)
# The engine's own names for extras that go by another name here.
RENAMED = {"lr_scheduler": "scheduler", "global_steps": "step"}
_SAME = ("data_sampler", "random_ltd", "global_samples", "skipped_steps")
CLIENT = "client_state"
_SCALES = ("LossScaler", "DynamicLossScaler")


def read_extras(model: Mapping[str, Any], scaler: Mapping[str, Any] | None) -> dict[str, Tree]:
    """The extras of rank 0's model file. A client key that has the name of another extra stays below `client_state`."""
    out: dict[str, Tree] = {}
    for key, name in (*RENAMED.items(), *zip(_SAME, _SAME, strict=True)):
        if model.get(key) is not None:
            out[name] = model[key]
    scaling = scaler_extra(scaler)
    if scaling is not None:
        out["scaler"] = scaling
    client = {key: value for key, value in model.items() if key not in ENGINE_KEYS}
    nested = client.pop(CLIENT, None)
    apart = {key: value for key, value in client.items() if key in out and key != "scaler"}
    out |= {key: value for key, value in client.items() if key not in apart}
    apart = {key: value for key, value in apart.items() if not _equal(value, out[key])}
    if isinstance(nested, Mapping) and nested and set(nested) <= ENGINE_KEYS:
        out |= nested
    elif nested is not None:
        apart = {**apart, **(nested if isinstance(nested, Mapping) else {CLIENT: nested})}
    return {**out, **({CLIENT: apart} if apart else {})}


def write_extras(extras: Mapping[str, Tree], *, scaled: bool) -> dict[str, Tree]:
    """The keys of a model file that hold the extras: the engine's own, and the client state flat beside them.

    `scaled`: the optimizer files hold a whole loss scaler of DeepSpeed's; elsewhere it is client state.
    """
    out: dict[str, Tree] = {"lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0}
    nested: dict[str, Tree] = {}
    engine = {name: key for key, name in RENAMED.items()} | {name: name for name in _SAME}
    for name, value in extras.items():
        if name in engine:
            out[engine[name]] = value
        elif name == CLIENT and isinstance(value, Mapping) and not set(value) & (ENGINE_KEYS | set(out)):
            out |= value
        elif name == "scaler" and scaled and is_deepspeed(value):
            continue
        elif name in ENGINE_KEYS:
            nested[name] = value
        else:
            out[name] = value
    return {**out, **({CLIENT: nested} if nested else {})}


def scaler_extra(scaler: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A loss scaler in the terms of `torch.amp.GradScaler.state_dict`, with DeepSpeed's own attributes beside them.

    None where nothing is scaled. GradScaler's tracker counts steps without an overflow, as `stable_interval` does in
    deepspeed/runtime/fp16/loss_scaler.py.
    """
    if scaler is None or scaler.get("kind") not in _SCALES:
        return None
    scale = scaler.get("cur_scale", 1.0)
    if scaler["kind"] == "LossScaler" and scale == 1:
        return None
    factor = float(scaler.get("scale_factor", 2.0))
    since = int(scaler.get("cur_iter", 0)) - int(scaler.get("last_overflow_iter", -1)) - 1
    return {
        "scale": float(scale),
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "growth_interval": int(scaler.get("scale_window", 2000)),
        "_growth_tracker": max(0, since),
        "deepspeed": dict(scaler),
    }


def is_deepspeed(scaler: Any) -> bool:
    """Whether a scaler extra is one of DeepSpeed's, to be written as such."""
    return isinstance(scaler, Mapping) and isinstance(scaler.get("deepspeed"), Mapping)


def deepspeed_scaler(scaler: Any, step: int) -> dict[str, Any] | None:
    """The attributes of DeepSpeed's dynamic loss scaler that go on where a scaler extra stopped; None without one."""
    if not isinstance(scaler, Mapping) or "scale" not in scaler:
        return None
    if is_deepspeed(scaler):
        return dict(scaler["deepspeed"])
    return {
        "kind": "DynamicLossScaler",
        "cur_scale": float(scaler["scale"]),
        "cur_iter": step,
        "last_overflow_iter": step - 1 - int(scaler.get("_growth_tracker", 0)),
        "scale_factor": float(scaler.get("growth_factor", 2.0)),
        "scale_window": int(scaler.get("growth_interval", 2000)),
        "min_scale": 1,
        "delayed_shift": 1,
        "cur_hysteresis": 1,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": "float16",
    }


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, int | float | str) and a == b
