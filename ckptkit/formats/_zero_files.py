"""The contents of a DeepSpeed checkpoint's files, read without DeepSpeed, and the check that they are of one save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.box import whole
from ..core.dtype import ITEMSIZE
from ..core.gather import gather
from ..core.spec import Tensor
from ..core.tree import Opaque
from ..errors import SourceError, UnsafePickleError
from ..io.globals import TensorStub
from ..io.move import move
from ..io.standin import Standin, kind_of
from ..io.torch_file import load_raw, to_tensor
from ..io.unpickle import as_tree
from ._zero_names import Files


@dataclass(frozen=True, slots=True)
class OptimFile:
    """One rank's optimizer file: its tree, and the loss scaler's attributes (of a class that is not imported)."""

    name: str
    tree: Mapping[str, Any]
    scaler: Mapping[str, Any] | None
    stage: int | None


def read_models(files: Files) -> dict[int, dict[str, Any]]:
    """The trees of the model files by rank. Raises SourceError naming every file that cannot be read."""
    found = _each(files.models, lambda path: load_raw(path))
    for rank, tree in found.items():
        if not isinstance(tree, Mapping) or "module" not in tree:
            raise SourceError(
                f"{files.models[rank]} is no model file of DeepSpeed", why="it has no key 'module'",
                hint="name the folder of a checkpoint that engine.save_checkpoint wrote",
            )  # fmt: skip
    trees = {rank: as_tree(tree, to_tensor) for rank, tree in found.items()}
    _refuse_parallel(files, trees)
    return trees


def read_optims(files: Files) -> dict[int, OptimFile]:
    """The optimizer files by rank. Raises SourceError naming every one that is missing, damaged or of another save."""
    found = {rank: as_optim_file(files.optims[rank].name, raw) for rank, raw in _each(files.optims, load_raw).items()}
    _check_ranks(files, {rank: count_of(file) for rank, file in found.items()})
    _check_same(
        "the files are not of one step",
        {
            file.name: {**_steps(file), "hyper-parameters": _hyper_parameters(file), "loss scaler": file.scaler}
            for file in found.values()
        },
    )
    return found


def check_models(files: Files, models: Mapping[int, Mapping[str, Any]], ranks: int) -> None:
    """Raise SourceError unless the model files are there for all `ranks`, and of one step and world size."""
    if files.partitioned:
        _check_ranks(files, dict.fromkeys(models, ranks), models=True)
    _check_same(
        "the model files are not of one save",
        {
            files.models[rank].name: {key: tree.get(key) for key in ("global_steps", "dp_world_size", "skipped_steps")}
            for rank, tree in models.items()
        },
    )
    said = next(iter(models.values())).get("dp_world_size")
    if isinstance(said, int) and said != ranks:
        name = next(iter(files.models.values())).name
        raise SourceError(
            f"{name} is of a run on {said} ranks, the optimizer files of one on {ranks}",
            why="files of two checkpoints lie in one folder",
            hint="restore the files of one save",
        )


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value))


def scalar(tensor: Tensor) -> float | int:
    """The value of a tensor of one element, read from its file."""
    import torch

    ((_, view),) = gather(tensor, whole(tensor.spec.shape), tensor.spec.dtype, move)
    return torch.frombuffer(bytearray(view), dtype=getattr(torch, tensor.spec.dtype))[0].item()


def _each(paths: Mapping[int, Any], load: Callable[[Any], Any]) -> dict[int, Any]:
    found, errors = {}, []
    for rank, path in sorted(paths.items()):
        try:
            found[rank] = load(path)
        except UnsafePickleError:
            raise
        except SourceError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SourceError(
            f"{len(errors)} files cannot be read",
            why=errors[0].why or "they are damaged",
            hint=errors[0].hint,
            faults=[error.what for error in errors],
        )
    return found


def as_optim_file(name: str, raw: Any, key: str = "optimizer_state_dict") -> OptimFile:
    """An optimizer file from what its pickle says. Raises SourceError where it is none."""
    tree = raw.get(key) if isinstance(raw, Mapping) else None
    if not isinstance(tree, Mapping):
        raise SourceError(
            f"{name} is no optimizer file of DeepSpeed",
            why=f"it has no key {key!r}",
            hint="name the folder that engine.save_checkpoint wrote",
        )
    stage = tree.get("zero_stage")
    number = stage.args[0] if isinstance(stage, Standin) and stage.args else stage
    clean = {part: value for part, value in tree.items() if part not in ("loss_scaler", "param_slice_mappings")}
    return OptimFile(
        name,
        as_tree(clean, to_tensor),
        _scaler(tree.get("loss_scaler")),
        int(number) if isinstance(number, int) else None,
    )


def _scaler(value: Any) -> dict[str, Any] | None:
    """The attributes of DeepSpeed's loss scaler, with the class's name as `kind`; dtypes by name."""
    if not isinstance(value, Standin) or not isinstance(value.state, Mapping):
        return None
    kind = kind_of(value).rpartition(".")[2]
    plain = {key: part for key, part in value.state.items() if isinstance(part, int | float | str | type(None))}
    dtype = value.state.get("dtype")
    named = str(dtype).removeprefix("torch.")
    return {"kind": kind, **plain, **({"dtype": named} if named in ITEMSIZE else {})}


def count_of(file: OptimFile) -> int | None:
    """The number of ranks that a file says it is one of."""
    count = file.tree.get("partition_count")
    if isinstance(count, list | tuple) and count:
        count = count[0]
    return count if isinstance(count, int) else None


def _check_ranks(files: Files, counts: Mapping[int, int | None], *, models: bool = False) -> None:
    known = sorted({count for count in counts.values() if count is not None})
    paths = files.models if models else files.optims
    if len(known) > 1:
        raise SourceError(
            f"the files in {files.folder} are of runs on different numbers of ranks",
            why="files of two checkpoints lie in one folder",
            hint="restore the files of one save",
            faults=[f"{paths[rank].name}: one of {count} ranks" for rank, count in counts.items()],
        )
    expected = known[0] if known else max(counts) + 1
    pattern = next(iter(paths.values())).name
    start = pattern.index("rank_") + len("rank_")
    end = pattern.index("_", start)
    missing = [rank for rank in range(expected) if rank not in counts]
    surplus = sorted(rank for rank in counts if rank >= expected)
    if missing or surplus:
        raise SourceError(
            f"{files.folder} is incomplete: {len(missing)} of {expected} ranks have no file"
            if missing
            else f"{files.folder} holds files of {len(surplus)} ranks more than the {expected} of the run",
            why="every rank holds a part of every parameter"
            if missing
            else "files of two checkpoints lie in one folder",
            hint="restore the missing files; nothing was written" if missing else "move the older files away",
            faults=[
                *(f"rank {rank}: {pattern[:start]}{rank}{pattern[end:]} is missing" for rank in missing),
                *(f"rank {rank}: {paths[rank].name} is one too many" for rank in surplus),
            ],
        )


def _check_same(what: str, said: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise SourceError with the evidence where files do not say the same."""
    first, *others = said
    faults = [
        f"{key} is {_short(said[first].get(key))} in {first}, {_short(said[other].get(key))} in {other}"
        for other in others
        for key in said[first]
        if said[first].get(key) != said[other].get(key)
    ]
    if faults:
        raise SourceError(
            what,
            why="a rank's file from another save loads without complaint in DeepSpeed and gives wrong weights",
            hint="restore the files of one save",
            faults=faults[:20],
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _steps(file: OptimFile) -> dict[str, Any]:
    """The steps in a file's optimizer state, by group or sub-group."""
    states = states_of(file)
    out = {}
    for index, slots in states.items():
        step = slots.get("step")
        if isinstance(step, Tensor) and step.spec.numel == 1:
            step = scalar(step)
        if step is not None:
            out[f"step of group {index}"] = step
    return out


def states_of(file: OptimFile) -> dict[int, Mapping[str, Any]]:
    """The optimizer state of each flat group or sub-group: rigid (a torch state dict) or elastic (a list)."""
    base = file.tree.get("base_optimizer_state", file.tree.get("optimizer_state_dict"))
    if isinstance(base, Mapping):
        return {int(key): slots for key, slots in base.get("state", {}).items() if isinstance(slots, Mapping)}
    if isinstance(base, list | tuple):
        return {index: slots for index, slots in enumerate(base) if isinstance(slots, Mapping)}
    return {}


def groups_of(file: OptimFile) -> list[dict[str, Any]] | None:
    """The optimizer's groups as they are in the file; None where it has none (elastic)."""
    base = file.tree.get("base_optimizer_state", file.tree.get("optimizer_state_dict"))
    if isinstance(base, Mapping) and isinstance(base.get("param_groups"), list):
        return [dict(group) for group in base["param_groups"]]
    return None


def _hyper_parameters(file: OptimFile) -> Any:
    """The hyper-parameters that can be compared without reading tensors."""
    return [
        {key: value for key, value in group.items() if not isinstance(value, Tensor | TensorStub | Opaque)}
        for group in groups_of(file) or []
    ]


def _refuse_parallel(files: Files, trees: Mapping[int, Mapping[str, Any]]) -> None:
    for rank, tree in trees.items():
        name = files.models[rank].name
        sizes = tree.get("checkpoint_parallel_dimensions") or {}
        faults = [f"{name}: {key} is {size}" for key, size in sizes.items() if isinstance(size, int) and size > 1]
        if tree["module"] is None:
            faults.append(f"{name}: its module is empty, the weights lie in files of a pipeline")
        if _experts(tree.get("num_experts")) or tree.get("ds_autoep_layers") or tree.get("autoep_layers"):
            faults.append(f"{name}: the model has experts (MoE)")
        if isinstance(tree.get("mp_world_size"), int) and tree["mp_world_size"] > 1:
            faults.append(f"{name}: {tree['mp_world_size']} tensor-parallel ranks")
        if faults:
            raise SourceError(
                f"{files.folder} was written by a run that is more than data parallel",
                why="tensor, pipeline and expert parallelism are not supported: their parts are not cut by the rules "
                "of ZeRO alone",
                hint="save it once without them",
                faults=faults,
            )


def _experts(said: Any) -> bool:
    counts: Sequence[Any] = said if isinstance(said, list | tuple) else [said]
    return any(isinstance(count, int) and count > 1 for count in counts)
