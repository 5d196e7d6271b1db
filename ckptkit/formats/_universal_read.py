"""A universal checkpoint as one tree: one folder a parameter, and the model files for all that is no parameter's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.box import Shape
from ..core.checkpoint import Contents
from ..core.options import ReadOptions
from ..core.spec import Tensor
from ..errors import SourceError, UnsafePickleError
from ..io.torch_file import load_raw, load_tree
from ._zero_extras import read_extras
from ._zero_files import OptimFile, as_optim_file, check_models, groups_of, read_models, shape_of, states_of
from ._zero_flat import joined
from ._zero_names import Files
from ._zero_read import Read, as_contents, compare_steps, model_parts, optimizer_parts
from ._zero_rule import PartitionRule

_WEIGHT = "fp32"


@dataclass(frozen=True, slots=True)
class Folders:
    """The parameters of a group (at stage 3 a sub-group), each read from its own folder."""

    group: int
    shapes: Mapping[str, Shape]
    dealt: bool
    slots: Mapping[str, Mapping[str, Any]]

    def weights(self) -> dict[str, Tensor]:
        return {name: self.slots[name][_WEIGHT] for name in self.shapes}

    def state(self) -> dict[str, dict[str, Any]]:
        return {name: {k: v for k, v in self.slots[name].items() if k != _WEIGHT} for name in self.shapes}


def read_universal(files: Files, options: ReadOptions) -> Contents:
    """Read a tag folder. Raises SourceError naming every parameter that has no folder or does not fit."""
    models = read_models(files)
    rank0 = models.get(0) or next(iter(models.values()))
    shapes = rank0.get("param_shapes")
    if not shapes:
        raise SourceError(
            f"{files.models[0]} names no parameters",
            why="its param_shapes is empty",
            hint="make the universal checkpoint again",
        )
    if files.partitioned and rank0.get("frozen_param_shapes"):
        check_models(files, models, int(rank0.get("dp_world_size") or len(models)))
    zero = files.folder / "zero"
    common = as_optim_file(f"{zero.name}/optimizer_state.pt", {"": load_raw(zero / "optimizer_state.pt")}, "")
    groups = groups_of(common) or [dict(group) for group in common.tree.get("param_groups", ())]
    units = _units(zero, shapes, common, groups, partitioned=files.partitioned)
    read = Read()
    hyper = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    ranks = int(rank0.get("dp_world_size") or 1)
    optimizer_parts(read, units, hyper, ranks, rank0)
    model_parts(read, units, [models[rank] for rank in sorted(models)], options)
    extras = read_extras(rank0, common.scaler)
    compare_steps(read, extras)
    version = rank0.get("ds_version") or "of unknown version"
    stage = "3" if files.partitioned else "1 or 2"
    return as_contents("universal", read, extras, rank0, f"universal of ZeRO-{stage}, DeepSpeed {version}", ranks)


def _units(
    zero: Path, shapes: Sequence[Any], common: OptimFile, groups: Sequence[Mapping[str, Any]], *, partitioned: bool
) -> list[Folders]:
    owner = {int(key): number for number, group in enumerate(groups) for key in group["params"]}
    steps = {index: state["step"] for index, state in states_of(common).items() if "step" in state}
    faults: list[str] = []
    units = []
    for index, named in enumerate(shapes):
        sizes = {name: shape_of(shape) for name, shape in named.items()}
        slots = {}
        for name, shape in sizes.items():
            try:
                slots[name] = dict(_slots(zero / name, name, shape))
            except UnsafePickleError:
                raise
            except SourceError as error:
                faults.append(error.what)
            else:
                # At stage 3 the step is kept once, in the common file.
                slots[name] |= {"step": steps[index]} if index in steps and "step" not in slots[name] else {}
        units.append(Folders(owner.get(index, index), sizes, not partitioned, slots))
    if faults:
        raise SourceError(
            f"{zero} is incomplete: {len(faults)} parameters cannot be read",
            why="every parameter of the model file has a folder of its own in a universal checkpoint",
            hint="make it again from the native checkpoint",
            faults=faults,
        )
    return units


def _slots(folder: Path, name: str, shape: Shape) -> Iterator[tuple[str, Any]]:
    """The tensors of one parameter by slot: whole with their shape (stage 1, 2), or flat (stage 3)."""
    if folder.parent.name != "zero" or not (folder / f"{_WEIGHT}.pt").is_file():
        raise SourceError(
            f"{name} has no {_WEIGHT}.pt",
            why="the folder of a parameter holds its weight under that name",
            hint="restore it or convert again",
        )
    for path in sorted(folder.glob("*.pt")):
        held = load_tree(path)
        if isinstance(held, Mapping):
            if held.get("is_expert_param"):
                raise SourceError(
                    f"{name} is an expert's (MoE), which is not supported",
                    why="experts are spread over ranks in a way of their own",
                    hint="use DeepSpeed itself for MoE runs",
                )
            held = held.get("param")
        if path.stem == "step" or not isinstance(held, Tensor):
            yield path.stem, held
            continue
        if held.spec.shape != shape:
            if held.spec.shape != (math.prod(shape),):
                raise SourceError(
                    f"{name}: {path.name} has the shape {held.spec.shape}, not {shape}",
                    why="it is of another model or damaged",
                    hint="make the universal checkpoint again",
                )
            whole = PartitionRule.of([math.prod(shape)], 1)
            held = joined({name: shape}, whole, [held], held.spec.dtype)[name]
        yield path.stem, held
