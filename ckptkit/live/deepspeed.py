"""deepspeed: a DeepSpeed engine with ZeRO 0 to 3: weights in the module, fp32 masters in flat partitions.

Source: runtime/zero/stage_1_and_2.py (`round_robin_bit16_groups`, `single_partition_of_fp32_groups`), stage3.py
(`fp16_groups`, `fp32_partitioned_groups_flat`), bf16_optimizer.py, fp16/unfused_optimizer.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import UsageError
from .holder import Holder, Live, Share, named_groups, run_share, whole_share
from .names import ModuleNames, module_names
from .plain import buffer_holders


def matches(model: nn.Module) -> bool:
    return type(model).__module__.startswith("deepspeed.") and hasattr(model, "zero_optimization_stage")


def adapt(model: Any, optimizer: Any) -> Live:
    """`optimizer` is the engine's own; another one is refused."""
    engine = model
    if optimizer is not None and optimizer is not engine.optimizer:
        raise UsageError(
            "the optimizer is not the engine's",
            why="the engine trains with its own",
            hint="pass none, or the one deepspeed.initialize returned",
        )
    names = module_names(engine.module)
    fqns = {id(parameter): fqn for fqn, parameter in names.parameters.items()}
    stage = engine.zero_optimization_stage()
    values = [*_values(names, stage), *buffer_holders(names.buffers)]
    outer = engine.optimizer
    trained: list[Holder] = []
    inner = None
    if outer is not None:
        inner = outer if isinstance(outer, torch.optim.Optimizer) else outer.optimizer
        trained = list(_trained(outer, fqns, stage))
    # The masters are other tensors than the weights unless a plain torch optimizer works on the weights themselves.
    masters = [] if outer is inner else trained
    return Live(
        "deepspeed",
        values,
        trained,
        masters,
        inner,
        groups=_groups(outer, inner, trained, stage),
        aliases=names.aliases,
        buffers=frozenset(names.buffers),
        frozen=names.frozen,
        scheduler=engine.lr_scheduler,
        counters={name: (engine, attribute) for name, attribute in _COUNTERS.items() if hasattr(engine, attribute)},
        finish=_finisher(outer, stage),
    )


_COUNTERS = {"step": "global_steps", "global_samples": "global_samples", "skipped_steps": "skipped_steps"}


def _values(names: ModuleNames, stage: int) -> Iterator[Holder]:
    for fqn, parameter in names.parameters.items():
        if stage == 3:
            part: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
            yield Holder(part.detach(), (_cut(fqn, parameter, 0),), parameter)
        else:
            yield Holder(parameter.detach(), (whole_share(fqn, tuple(parameter.shape)),), parameter)


def _cut(fqn: str, parameter: Any, start: int) -> Share:
    """This rank's part of a ZeRO-3 parameter: its ceil(numel / ranks) elements, less the padding at the end."""
    size, numel = parameter.partition_numel(), parameter.ds_numel
    begin = min(dist.get_rank() * size, numel)
    return run_share(fqn, tuple(parameter.ds_shape), begin, min(begin + size, numel), start)


def _trained(outer: Any, fqns: Mapping[int, str], stage: int) -> Iterator[Holder]:
    if stage == 3:
        for sub_group, flat in zip(outer.fp16_groups, outer.fp32_partitioned_groups_flat, strict=True):
            shares, at = [], 0
            for parameter in sub_group:
                shares.append(_cut(fqns[id(parameter)], parameter, at))
                at += parameter.partition_numel()
            yield Holder(flat.detach(), tuple(shares), flat)
    elif hasattr(outer, "round_robin_bit16_groups"):
        for index, parameters in enumerate(outer.round_robin_bit16_groups):
            flat = outer.single_partition_of_fp32_groups[index]
            begin = dist.get_rank() * outer.partition_size[index]
            yield _flat(flat, parameters, outer.round_robin_bit16_offsets[index], begin, fqns)
    elif hasattr(outer, "bf16_groups"):
        for parameters, flat in zip(outer.bf16_groups, outer.fp32_groups_flat_partition, strict=True):
            offsets = [sum(p.numel() for p in parameters[:index]) for index in range(len(parameters))]
            yield _flat(flat, parameters, offsets, dist.get_rank() * flat.numel(), fqns)
    elif hasattr(outer, "fp16_groups"):
        for weights, masters in zip(outer.fp16_groups, outer.fp32_groups, strict=True):
            for parameter, master in zip(weights, masters, strict=True):
                yield Holder(master.detach(), (whole_share(fqns[id(parameter)], tuple(parameter.shape)),), master)
    else:
        for group in outer.param_groups:
            for parameter in group["params"]:
                share = whole_share(fqns[id(parameter)], tuple(parameter.shape))
                yield Holder(parameter.detach(), (share,), parameter)


def _flat(
    flat: torch.Tensor, parameters: Sequence[Any], offsets: Sequence[int], begin: int, fqns: Mapping[int, str]
) -> Holder:
    """The part of each parameter in this rank's `[begin, begin + numel)` of a group's vector."""
    shares = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        low, high = max(offset, begin), min(offset + parameter.numel(), begin + flat.numel())
        name, shape = fqns[id(parameter)], tuple(parameter.shape)
        if low < high:
            shares.append(run_share(name, shape, low - offset, high - offset, low - begin))
        else:
            shares.append(Share(name, shape, (), 0))
    return Holder(flat.detach(), tuple(shares), flat)


def _groups(outer: Any, inner: Any, trained: Sequence[Holder], stage: int) -> list[tuple[dict[str, Any], list[str]]]:
    if stage != 3 or inner is None:
        return named_groups(inner, {id(holder.key): [s.fqn for s in holder.shares] for holder in trained})
    # Between steps the groups of stage 3 are empty: a table says which sub-groups belong to which.
    names: dict[int, list[str]] = {}
    for index, holder in enumerate(trained):
        names.setdefault(outer.sub_group_to_group_id[index], []).extend(share.fqn for share in holder.shares)
    return [(group, names.get(index, [])) for index, group in enumerate(inner.param_groups)]


def _finisher(outer: Any, stage: int) -> Callable[[], None]:
    def finish() -> None:
        if stage == 3 and getattr(outer, "persistent_parameters", None):
            outer.persistent_parameters[0].partition(outer.persistent_parameters)
            outer.persistent_parameters[0].all_gather(outer.persistent_parameters)

    return finish
