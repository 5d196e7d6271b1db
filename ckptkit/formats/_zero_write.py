"""The trees of DeepSpeed's own files for any world size, laid out to the byte; `engine.load_checkpoint` takes them.

Source of what an engine needs: `_load_checkpoint`, `_load_zero_checkpoint` in runtime/engine.py, `state_dict` of
stage_1_and_2.py, stage3.py and fp16/unfused_optimizer.py (0.19.8).
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from ..core.layout import Layout, OutFile, Raw
from ..core.spec import Tensor, TensorKey
from ..core.tree import Tree
from ..io.pickle_out import Call, Global
from ..io.torch_layout import torch_files
from ._zero_config import Config
from ._zero_extras import deepspeed_scaler, write_extras
from ._zero_files import scalar
from ._zero_names import LATEST, model_file, optim_file
from ._zero_rule import FlatRule, PartitionRule, alignment_paddings, sub_groups
from ._zero_source import Group, Source
from ._zero_vectors import alone, contents, placeholder, vector

DS_VERSION = "0.19.8"  # whose layout this is; engines compare it with what they can load
_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_MASTER = "master"


def native_layout(source: Source, config: Config) -> Layout:
    """Every file of a checkpoint, `latest` last."""
    tag = f"global_step{source.step}"
    label = labels(source)
    files: list[OutFile] = []
    if config.stage:
        prefix = "bf16_" if source.low == "bfloat16" else ""
        names = [optim_file(rank, prefix=prefix) for rank in range(config.ranks)]
        # At ZeRO 3 all ranks have the same tree; a group's last vectors are shorter at ZeRO 1 and 2.
        for ranks in [range(config.ranks)] if config.stage == 3 else [[rank] for rank in range(config.ranks)]:
            tree = {"optimizer_state_dict": optim_tree(source, config, ranks[0]), **_about(config)}
            files += _files(tag, {rank: names[rank] for rank in ranks}, tree, label)
    partitioned = config.stage == 3
    models = {rank: model_file(rank, partitioned=partitioned) for rank in range(config.ranks if partitioned else 1)}
    files += _files(tag, models, model_tree(source, config), label)
    files.append(OutFile(LATEST, (Raw(tag.encode()),)))
    return Layout(tuple(files), implied=tuple(implied(source, config)))


def _files(tag: str, names: Mapping[int, str], tree: Tree, label: Any) -> Iterator[OutFile]:
    """A file a rank, all with the same tree."""
    parts = [(name.removesuffix(".pt"), contents(label, rank)) for rank, name in names.items()]
    for name, segments in zip(names.values(), torch_files(tree, parts), strict=True):
        yield OutFile(f"{tag}/{name}", tuple(segments))


def implied(source: Source, config: Config) -> Iterator[Tensor]:
    """Tensors that the files hold without bytes of their own: at stage 3 the weights are their masters, rounded."""
    yield from source.implied
    if config.stage == 3:
        for name in source.weights:
            yield source.module[name]


def labels(source: Source) -> Any:
    """Names for messages of the tensors that are written whole."""
    names = {id(held): TensorKey(source.aliases.get(name, name)) for name, held in source.module.items()}
    for name, slots in source.states.items():
        names |= {id(value): TensorKey(name, slot) for slot, value in slots.items()}

    def label(tensor: Tensor) -> TensorKey:
        return names.get(id(tensor), TensorKey("extras", "extra"))

    return label


def model_tree(source: Source, config: Config) -> dict[str, Tree]:
    """A model file: at ZeRO 3 one a rank, with placeholders for parameters and the rank's parts of frozen ones."""
    partitioned = config.stage == 3
    module = OrderedDict(source.module)
    if partitioned:
        for name in [*source.weights, *source.frozen, *source.aliases]:
            module[name] = placeholder(source.low if name not in source.frozen else source.frozen[name].spec.dtype)
    frozen = {
        name: _part(tensor, name, config.ranks) if partitioned else tensor for name, tensor in source.frozen.items()
    }
    shapes = OrderedDict((name, torch.Size(tensor.spec.shape)) for name, tensor in source.frozen.items())
    # An engine without ZeRO writes no names; it does not mind them either, and they tell ids of its optimizer apart.
    return {
        "module": module,
        "buffer_names": list(source.buffers),
        "optimizer": None if config.stage else stage0_tree(source, config),
        "param_shapes": [_sizes(source, names) for names in _units(source, config)],
        "frozen_param_shapes": shapes if config.stage else None,
        "shared_params": dict(source.aliases),
        "frozen_param_fragments": OrderedDict(frozen) if config.stage else None,
        "dp_world_size": config.ranks,
        "mp_world_size": 1,
        **_about(config),
        **write_extras(source.extras, scaled=config.stage > 0 and source.low == "float16"),
        "global_steps": source.step,
    }


def optim_tree(source: Source, config: Config, rank: int) -> dict[str, Tree]:
    """The optimizer's part of a rank's file at stage 1, 2 or 3."""
    common = about_loss(source, config)
    return {**common, **(_partitions(source, config) if config.stage == 3 else _flat_groups(source, config, rank))}


def about_loss(source: Source, config: Config) -> dict[str, Tree]:
    """The loss scaler and what else the optimizer files of every stage hold."""
    scaler = _scaler(source)
    return {
        "zero_stage": Call(_STAGE, (config.stage,)),
        "loss_scaler": scaler,
        "dynamic_loss_scale": scaler.function.name == "DynamicLossScaler",
        "overflow": False,
        "ds_version": DS_VERSION,
    }


def _flat_groups(source: Source, config: Config, rank: int) -> dict[str, Tree]:
    rules: list[FlatRule] = []
    states: dict[int, Tree] = {}
    weights: list[Tree] = []
    for index, group in enumerate(source.groups):
        shapes = source.shapes(group.names)
        numels = [math.prod(shape) for shape in shapes.values()]
        paddings = alignment_paddings(numels, source.low) if config.aligned else None
        rule = FlatRule.of(numels, config.ranks, paddings)
        rules.append(rule)
        weights.append(vector(rule, shapes, source.weights, _slot(source), "float32", lean=rank))
        if group.cut or group.shared:
            cut = {slot: vector(rule, shapes, held, slot, _dtype(held)) for slot, held in group.cut.items()}
            states[index] = {**shared_tree(group, config), **cut}
    groups = [{**group_tree(group, config), "params": [index]} for index, group in enumerate(source.groups)]
    return {
        "base_optimizer_state": {"state": states, "param_groups": groups},
        "single_partition_of_fp32_groups": weights,
        "group_paddings": [rule.size - rule.lean(rank) for rule in rules],
        "param_alignment_paddings": [list(rule.paddings) for rule in rules],
        "partition_count": [config.ranks] * len(rules),
        "param_slice_mappings": [
            OrderedDict(
                (group.names[span.index], Call(_FRAGMENT, (span.stop - span.start, span.offset)))
                for span in rule.spans(rank)
            )
            for group, rule in zip(source.groups, rules, strict=True)
        ],
    }


def _partitions(source: Source, config: Config) -> dict[str, Tree]:
    states: dict[int, Tree] = {}
    weights: list[Tree] = []
    groups: list[Tree] = []
    for group, ids in zip(source.groups, sub_group_ids(source, config), strict=True):
        for names in _sub_groups(source, group, config):
            shapes = source.shapes(names)
            rule = PartitionRule.of([math.prod(shape) for shape in shapes.values()], config.ranks)
            if group.cut or group.shared:
                cut = {slot: vector(rule, shapes, held, slot, _dtype(held)) for slot, held in group.cut.items()}
                states[len(weights)] = {**shared_tree(group, config), **cut}
            weights.append(vector(rule, shapes, source.weights, _slot(source), "float32"))
        groups.append({**group_tree(group, config), "params": ids})
    return {
        "partition_count": config.ranks,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
        "fp32_flat_groups": weights,
    }


def stage0_tree(source: Source, config: Config) -> dict[str, Tree]:
    """The optimizer in the model file: torch's own state dict, in low precision with the masters beside it.

    DeepSpeed's own Adam in low precision (FP16_Optimizer) has one vector a group instead.
    """
    low = source.low != "float32"
    scale = _scale(source) if low else {}
    if low and config.fused:
        parts = _partitions(source, replace(config, ranks=1, sub_group_size=sys.maxsize))
        base = parts["optimizer_state_dict"]
        return {
            **scale,
            "optimizer_state_dict": base,
            "fp32_groups_flat": parts["fp32_flat_groups"],
            "clip_grad": config.clip,
        }
    ids = {name: index for index, name in enumerate(name for group in source.groups for name in group.names)}
    groups = [{**group_tree(group, config), "params": [ids[name] for name in group.names]} for group in source.groups]
    states = {ids[name]: dict(slots) for name, slots in source.states.items() if name in ids and slots}
    if config.fused:
        for slots in states.values():
            slots |= {"step": int(scalar(slots["step"]))} if isinstance(slots.get("step"), Tensor) else {}
    optimizer = {"state": dict(sorted(states.items())), "param_groups": groups}
    if not low:
        return optimizer
    masters = [[_as_float32(source.weights[name]) for name in group.names] for group in source.groups]
    return {**scale, "optimizer_state_dict": optimizer, "fp32_groups": masters}


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.spec.dtype == "float32" else tensor.cast("float32")


def _scale(source: Source) -> dict[str, Tree]:
    """What FP16_Optimizer and FP16_UnfusedOptimizer keep of loss scaling; they keep it in bf16 too."""
    held = deepspeed_scaler(source.extras.get("scaler"), source.step) if source.low == "float16" else None
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    said = {key: value for key, value in (held or {}).items() if key in keys}
    dynamic = (held or {}).get("kind") == "DynamicLossScaler"
    return {"dynamic_loss_scale": dynamic, "cur_scale": 1.0, "cur_iter": source.step, **said}


def _units(source: Source, config: Config) -> Iterator[Sequence[str]]:
    """The names of each entry of `param_shapes`: a group's, or at ZeRO 3 a sub-group's."""
    for group in source.groups:
        yield from _sub_groups(source, group, config) if config.stage == 3 else [group.names]


def sub_group_ids(source: Source, config: Config) -> list[list[int]]:
    """The numbers of each group's sub-groups, counted through all groups."""
    counts = [len(list(_sub_groups(source, group, config))) for group in source.groups]
    ends = list(accumulate(counts))
    return [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def _sub_groups(source: Source, group: Group, config: Config) -> Iterator[list[str]]:
    numels = [source.weights[name].spec.numel for name in group.names]
    for indexes in sub_groups(numels, config.ranks, config.sub_group_size):
        yield [group.names[index] for index in indexes]


def _part(tensor: Tensor, name: str, ranks: int) -> Any:
    rule = PartitionRule.of([tensor.spec.numel], ranks)
    return vector(rule, {name: tensor.spec.shape}, {name: tensor}, "value", tensor.spec.dtype)


def _sizes(source: Source, names: Sequence[str]) -> OrderedDict[str, Tree]:
    return OrderedDict((name, torch.Size(source.weights[name].spec.shape)) for name in names)


def _dtype(tensors: Mapping[str, Tensor]) -> str:
    """States keep their dtype; an engine brings them to that of its masters (`Optimizer.load_state_dict` of torch)."""
    return next(iter(tensors.values())).spec.dtype


def _slot(source: Source) -> str:
    return "value" if source.low == "float32" else _MASTER


def shared_tree(group: Group, config: Config) -> dict[str, Tree]:
    """What a group has one of. DeepSpeed's own Adam counts steps in integers, torch's in a tensor."""
    counts = config.fused or "bias_correction" in group.hyper
    return {
        slot: int(scalar(value) if isinstance(value, Tensor) else value)
        if slot == "step" and counts
        else alone(value, TensorKey(group.names[0], slot))
        if isinstance(value, Tensor)
        else value
        for slot, value in group.shared.items()
    }


def group_tree(group: Group, config: Config) -> dict[str, Tree]:
    """A group's hyper-parameters, with the one that DeepSpeed's own Adam cannot do without."""
    own = {"bias_correction": True} if config.fused and "betas" in group.hyper else {}
    return {**own, **group.hyper}


def _scaler(source: Source) -> Call:
    """A loss scaler by the name of its class. Nothing is scaled but in fp16."""
    held = deepspeed_scaler(source.extras.get("scaler"), source.step) if source.low == "float16" else None
    state = dict(held or {"kind": "LossScaler", "cur_scale": 1.0, "dynamic": False})
    kind = state.pop("kind")
    if kind == "LossScaler":
        return Call(Global(_SCALER, "LossScaler"), (state["cur_scale"],), state)
    if isinstance(state.get("dtype"), str):
        state["dtype"] = getattr(torch, state["dtype"])
    made = ("cur_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
    return Call(Global(_SCALER, "DynamicLossScaler"), tuple(state[key] for key in made), state)


def _about(config: Config) -> dict[str, Tree]:
    return {"ds_config": dict(config.given or {}), "ds_version": DS_VERSION}
