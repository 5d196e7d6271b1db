"""ZeRO 0: one model file that holds the optimizer too, with fp32 masters beside low-precision weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.assemble import Hints
from ..core.box import Shape
from ..core.checkpoint import Contents, Drop
from ..core.dtype import is_float
from ..core.options import ReadOptions
from ..core.param_ids import match_ids, named_ids
from ..core.spec import Tensor
from ..errors import AmbiguousError
from ._zero_extras import read_extras
from ._zero_flat import joined
from ._zero_names import Files
from ._zero_rule import PartitionRule

_GONE = "its files (*_optim_states.pt) are not there: only the weights of the model file are"


def read_stage0(files: Files, model: Mapping[str, Any], options: ReadOptions) -> Contents:
    """The tree of a model file without optimizer files beside it.

    An fp32 engine keeps the torch optimizer's own state dict, by integer id. FP16_UnfusedOptimizer keeps lists of
    masters, FP16_Optimizer (fused) one vector of masters and one of each state a group.
    """
    tree: dict[str, Any] = {"model": dict(model["module"])}
    drops: tuple[Drop, ...] = ()
    optimizer = model.get("optimizer")
    scaler = None
    if isinstance(optimizer, Mapping) and "optimizer_state_dict" in optimizer:
        state, masters = _with_masters(optimizer, model, options.hints)
        tree |= {"optimizer": state, "master": masters}
        scaler = _scaler(optimizer)
    elif isinstance(optimizer, Mapping) and "param_groups" in optimizer:
        tree["optimizer"] = _named(_counted(optimizer), model)
    elif model.get("param_shapes"):
        drops = (Drop("optimizer", _GONE),)
    tree |= read_extras(model, scaler)
    ranks = model.get("dp_world_size")
    stage = "ZeRO-1 or 2 without optimizer files" if drops else "ZeRO-0"
    facts: dict[str, Any] = {"drops": drops}
    if model.get("buffer_names") is not None:
        facts["buffers"] = frozenset(model["buffer_names"])
    if model.get("shared_params"):
        facts["aliases"] = dict(model["shared_params"])
    return Contents(
        "zero",
        tree,
        f"{stage}, DeepSpeed {model.get('ds_version', 'of unknown version')}",
        ranks if isinstance(ranks, int) else None,
        facts=facts,
    )


def _counted(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """One step for a whole group of DeepSpeed's FusedAdam, which counts in the last parameter's state alone
    (`step` of deepspeed/ops/adam/fused_adam.py, 0.19.8) and computes with that count for all.
    """
    states = {key: dict(slots) for key, slots in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        own = [states[key] for key in group["params"] if key in states]
        steps = [slots["step"] for slots in own if isinstance(slots.get("step"), int)]
        if "bias_correction" in group and len(steps) == len(own) > 0:
            for slots in own:
                slots["step"] = max(steps)
    return {**optimizer, "state": states}


def _named(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The optimizer by name where the file has names (one that ckptkit wrote), else by id as it is."""
    ids = [list(group["params"]) for group in optimizer["param_groups"]]
    names = _said(ids, model)
    if names is None:
        return optimizer
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {names[key]: slots for key, slots in optimizer["state"].items()}, "param_groups": groups}


def _said(ids: Sequence[Sequence[int]], model: Mapping[str, Any]) -> dict[int, str] | None:
    shapes = model.get("param_shapes")
    if not shapes or [len(group) for group in shapes] != [len(group) for group in ids]:
        return None
    return {key: name for keys, group in zip(ids, shapes, strict=True) for key, name in zip(keys, group, strict=True)}


def _with_masters(
    optimizer: Mapping[str, Any], model: Mapping[str, Any], hints: Hints
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    base = optimizer["optimizer_state_dict"]
    groups = [dict(group) for group in base["param_groups"]]
    if "fp32_groups_flat" in optimizer:
        return _fused(optimizer["fp32_groups_flat"], base, groups, model, hints)
    ids = [list(group["params"]) for group in groups]
    flat = {
        key: t
        for keys, row in zip(ids, optimizer["fp32_groups"], strict=True)
        for key, t in zip(keys, row, strict=True)
    }
    names = _names(ids, {key: tensor.spec.shape for key, tensor in flat.items()}, model, hints)
    state = {names[key]: slots for key, slots in base["state"].items()}
    named = [{**group, "params": [names[key] for key in group["params"]]} for group in groups]
    return {"state": state, "param_groups": named}, {names[key]: tensor for key, tensor in flat.items()}


def _fused(
    vectors: Sequence[Tensor],
    base: Mapping[str, Any],
    groups: list[dict[str, Any]],
    model: Mapping[str, Any],
    hints: Hints,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A group is one vector without padding (apex's flatten): its parameters are told by order and total size."""
    state: dict[str, dict[str, Any]] = {}
    masters: dict[str, Tensor] = {}
    for group, vector, names in zip(groups, vectors, _by_size(vectors, model, hints), strict=True):
        shapes = {name: model["module"][name].spec.shape for name in names}
        rule = PartitionRule.of([math.prod(shape) for shape in shapes.values()], 1)
        masters |= joined(shapes, rule, [vector], vector.spec.dtype)
        slots = base["state"].get(group["params"][0], {})
        group["params"] = names
        for slot, value in slots.items():
            cut = isinstance(value, Tensor) and value.spec.shape == vector.spec.shape and slot != "step"
            parts = joined(shapes, rule, [value], value.spec.dtype) if cut else dict.fromkeys(names, value)
            for name in names:
                state.setdefault(name, {})[slot] = parts[name]
    return {"state": state, "param_groups": groups}, masters


def _by_size(vectors: Sequence[Tensor], model: Mapping[str, Any], hints: Hints) -> list[list[str]]:
    shapes = model.get("param_shapes")
    if shapes and len(shapes) == len(vectors):
        return [list(group) for group in shapes]
    candidates = _candidates(model, hints)
    sizes = {name: math.prod(shape) for name, shape in candidates.items()}
    out, left = [], list(candidates)
    for vector in vectors:
        names, total = [], 0
        while left and total < vector.spec.numel:
            names.append(left.pop(0))
            total += sizes[names[-1]]
        out.append(names)
        if total != vector.spec.numel:
            raise AmbiguousError(
                f"a group's vector of {vector.spec.numel} elements cannot be cut: its parameters are not in the file",
                why="a fused optimizer at ZeRO-0 keeps neither names nor shapes, and the model's parameters in order "
                f"make {total} elements",
                hint="--param-names FILE: the trained parameters, group after group",
            )
    if left:
        raise AmbiguousError(
            f"{len(left)} parameters of the model are in no group, {left[0]} among them",
            why="a fused optimizer at ZeRO-0 keeps no names, and which are frozen is not in the file",
            hint="--param-names FILE: the trained parameters, group after group",
        )
    return out


def _candidates(model: Mapping[str, Any], hints: Hints) -> dict[str, Shape]:
    """The parameters that may be trained, in order: no buffers, tied names once."""
    module = model["module"]
    known = {name: tensor for name, tensor in module.items() if isinstance(tensor, Tensor)}
    if hints.param_names is not None:
        return {name: known[name].spec.shape for name in hints.param_names if name in known}
    if hints.model is not None:
        names = [name for name in hints.model.parameters if name not in hints.model.frozen]
        return {name: known[name].spec.shape for name in names if name in known}
    buffers, seen = set(model.get("buffer_names") or ()), set()
    out = {}
    for name, tensor in known.items():
        if name not in buffers and is_float(tensor.spec.dtype) and tensor.spec.numel and tensor.storage not in seen:
            seen.add(tensor.storage)
            out[name] = tensor.spec.shape
    return out


def _names(
    ids: Sequence[Sequence[int]], shapes: Mapping[int, Shape], model: Mapping[str, Any], hints: Hints
) -> dict[int, str]:
    said = _said(ids, model)
    if said is not None:
        return said
    candidates = _candidates(model, hints)
    if hints.param_names is not None and len(candidates) == sum(map(len, ids)):
        return named_ids(ids, list(candidates))
    return match_ids(ids, shapes, candidates)


def _scaler(optimizer: Mapping[str, Any]) -> dict[str, Any] | None:
    if "cur_scale" not in optimizer:
        return None
    kind = "DynamicLossScaler" if optimizer.get("dynamic_loss_scale") else "LossScaler"
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    return {"kind": kind, **{key: optimizer[key] for key in keys if key in optimizer}}
