"""The files of a universal checkpoint: they are the same for every number of ranks.

Source of what an engine needs: `load_hp_checkpoint_state` in deepspeed/checkpoint/universal_checkpoint.py,
`load_hp_checkpoint_state_from_checkpoint_dir` in runtime/base_optimizer.py and `..._stage3` in runtime/zero/stage3.py
(0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..core.checkpoint import Drop
from ..core.layout import Layout, OutFile, Raw
from ..core.options import WriteOptions
from ..core.spec import Tensor, TensorKey
from ..core.tree import Tree
from ..io.pickle_out import StorageSlice
from ..io.torch_layout import torch_file
from ._zero_config import Config, read_config
from ._zero_files import scalar
from ._zero_names import model_file
from ._zero_source import Group, Source
from ._zero_vectors import alone, contents
from ._zero_write import about_loss, group_tree, implied, labels, model_tree, shared_tree, sub_group_ids

POINTER = "latest_universal"
_ADAM = ("exp_avg", "exp_avg_sq")  # all that the loader of stage 3 takes, by name


def universal_config(options: WriteOptions) -> Config:
    """The stage whose form is written; the number of ranks plays no part."""
    zero = (options.ds_config or {}).get("zero_optimization")
    said = zero.get("stage") if isinstance(zero, Mapping) else None
    stage = 3 if options.target == "universal3" or said == 3 else said if said in (1, 2) else 2
    config = read_config(replace(options, target=f"zero{stage}", world_size=1))
    return replace(config, round_robin=False, aligned=False)


def universal_layout(source: Source, config: Config) -> Layout:
    """Every file, the pointer last."""
    tag = f"global_step{source.step}"
    content = contents(labels(source))

    def file(name: str, tree: Tree) -> OutFile:
        return OutFile(
            f"{tag}/{name}", tuple(torch_file(tree, content, root=name.rpartition("/")[2].removesuffix(".pt")))
        )

    files = [
        file(f"zero/{name}/{slot}.pt", tree)
        for group in source.groups
        for name in group.names
        for slot, tree in _slots(source, group, name, config)
    ]
    files.append(file("zero/optimizer_state.pt", _common(source, config)))
    files.append(file(model_file(0, partitioned=config.stage == 3), model_tree(source, config)))
    files.append(OutFile(POINTER, (Raw(tag.encode()),)))
    return Layout(tuple(files), implied=tuple(implied(source, config)))


def _slots(source: Source, group: Group, name: str, config: Config) -> Iterator[tuple[str, Tree]]:
    """The files of one parameter. At stage 3 tensors lie flat, without a dict around them, and the step elsewhere."""
    key = TensorKey(name, "value" if source.low == "float32" else "master")
    held = {"fp32": (key, source.weights[name])}
    held |= {slot: (TensorKey(name, slot), tensors[name]) for slot, tensors in group.cut.items() if name in tensors}
    for slot, (key, tensor) in held.items():
        dtype = "float32" if slot == "fp32" else tensor.spec.dtype
        if config.stage == 3:
            if slot == "fp32" or slot in _ADAM:
                yield slot, alone(tensor, key, dtype, flat=True)
        else:
            yield slot, {"param": alone(tensor, key, dtype), "cat_dim": 0}
    if config.stage != 3 and "step" in group.shared:
        yield "step", shared_tree(group, config)["step"]


def _common(source: Source, config: Config) -> dict[str, Tree]:
    common: dict[str, Tree] = about_loss(source, config)
    if config.stage != 3:
        groups = [{**group_tree(group, config), "params": [index]} for index, group in enumerate(source.groups)]
        return {**common, "partition_count": [config.ranks] * len(groups), "param_groups": groups}
    ids = sub_group_ids(source, config)
    groups = [{**group_tree(group, config), "params": own} for group, own in zip(source.groups, ids, strict=True)]
    states = {
        index: {"step": shared_tree(group, config)["step"]}
        for group, own in zip(source.groups, ids, strict=True)
        for index in own
        if "step" in group.shared
    }
    optimizer = {"state": states, "param_groups": groups}
    return {**common, "partition_count": config.ranks, "optimizer_state_dict": optimizer, "param_groups": groups}


def universal_drops(source: Source, config: Config) -> list[Drop]:
    """What the form cannot hold: other states than Adam's, at stage 3; plain values beside the step."""
    drops = list(source.drops)
    for group in source.groups:
        for slot, tensors in group.cut.items():
            if config.stage == 3 and slot not in _ADAM:
                reason = "the loader of stage 3 takes fp32, exp_avg and exp_avg_sq by name, and fails without them"
                drops += [Drop(str(TensorKey(name, slot)), reason) for name in tensors]
        for slot, value in group.shared.items():
            if slot != "step" and value is not None:
                reason = f"{slot} has no place in a universal checkpoint"
                drops += [
                    Drop(str(TensorKey(name, slot)), reason) for name in group.names if slot in source.states[name]
                ]
    return drops


def universal_warnings(source: Source, config: Config) -> list[str]:
    """What DeepSpeed does not restore from a universal checkpoint though the files hold it (measured, 0.19.8)."""
    native = f"--to zero{config.stage} --world-size N"
    out = list(source.warnings)
    left = [*source.buffers, *source.frozen]
    if left:
        out.append(
            f"DeepSpeed leaves {len(source.buffers)} buffers and {len(source.frozen)} frozen parameters at their "
            f"initial values when it loads a universal checkpoint ({', '.join(left[:4])}, ...); {native} restores them"
        )
    if config.stage == 3:
        out += _stage3_warnings(source, config, native)
    return out


def _stage3_warnings(source: Source, config: Config, native: str) -> Iterator[str]:
    """`load_hp_checkpoint_state_from_checkpoint_dir_stage3` knows one group and one step for all."""
    differing = sorted(_differing([group.hyper for group in source.groups]))
    if differing:
        yield (
            "DeepSpeed gives every group the hyper-parameters of the first when it loads a universal checkpoint of "
            f"stage 3: {', '.join(differing)} differ here; {native} keeps them"
        )
    steps = [group.shared["step"] for group in source.groups if "step" in group.shared]
    if len({scalar(step) if isinstance(step, Tensor) else step for step in steps}) > 1:
        yield f"DeepSpeed takes the first group's step for all; they differ here; {native} keeps them"
    units = sum(map(len, sub_group_ids(source, config)))
    if units > 1 and any(isinstance(shared_tree(group, config).get("step"), StorageSlice) for group in source.groups):
        yield (
            f"after loading a universal checkpoint of stage 3 DeepSpeed keeps one step counter for all {units} groups, "
            f"and an optimizer of torch counts it {units} times a step; {native} keeps them apart"
        )


def _differing(groups: list[Mapping[str, Any]]) -> set[str]:
    keys = {key for group in groups for key in group}
    return {key for key in keys if len({repr(_plain(group.get(key))) for group in groups}) > 1}


def _plain(value: Any) -> Any:
    return "a tensor" if isinstance(value, Tensor) else value
