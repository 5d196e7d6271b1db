"""rank_files: one torch file for each rank, as FSDP1 and FSDP2 scripts write without torch.distributed.checkpoint.

What: FSDP2's DTensors (verl's `model_world_size_W_rank_R.pt`), FSDP1's sharded state dicts (ShardedTensor, DTensor),
and FSDP1's local ones, which hold flat parameters; with them each rank's optimizer, by name or by integer id. A folder,
or one of its files, is named; the others are found by name, or, with `--from rank_files`, from contents where names say
nothing.

Why it is checked: such files load without complaint whatever rank or step they are of. Here each file must be of the
rank that its name says, of one world size with the others, and of the same step; every rank that is missing is named.

Written: `--to verl`, `--to fsdp1-ranks`, and `--to fsdp1-local`, which is what a script with
`StateDictType.LOCAL_STATE_DICT` and plain `optimizer.load_state_dict` loads. A local state dict is flat parameters, one
for each wrapped module, and is told how the run that loads it calls FSDP1:

    ckptkit convert SRC DST --to fsdp1-local --world-size 8 --model train:build_model --fsdp-units Block,encoder.*

`--model` builds the model, unwrapped, on the meta device. `--fsdp-units` names the wrapped modules: classes as in
`transformer_layer_cls`, paths, or paths with `*` for one part; the model itself has what they leave.
`--use-orig-params` as FSDP1 is called: with it optimizer ids are parameters, and `load_state_dict` needs
`strict=False`; without it they are whole units, so that groups may not cut through one. `--fsdp-param-dtype` is
MixedPrecision's `param_dtype`, to which use_orig_params aligns. `--mesh cpu` where the run is on CPUs.

Limits: flat parameters need `--model pkg.mod:factory`: names or shapes are not in the files. Extras that differ from
rank to rank (RNG states) become `{"rank_0": ..., "rank_1": ...}`, and are written to the ranks in their turn.
Placements but Shard and Replicate are refused. FSDP1's `ignored_modules` and HYBRID_SHARD are not written; NO_SHARD has
no local form. An optimizer is taken to hold its flat parameters in the order in which the wrapped model yields them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.checkpoint import Contents, Drop
from ..core.layout import Layout
from ..core.options import ReadOptions, WriteOptions
from ..core.rank_names import rank_of
from ..core.spec import Tensor
from ..core.tree import Tree
from ..errors import SourceError
from . import _rank_local, _rank_write
from ._rank_flat import is_flat, model_of, units_of
from ._rank_local import FSDP1_LOCAL
from ._rank_merge import Merge, extra
from ._rank_optimizer import is_local, of_shapes, of_units
from ._rank_parts import Sharded
from ._rank_sets import Loaded, load, named_sets, unnamed_set

NAME = "rank_files"
TARGETS = {
    "verl": "FSDP2 DTensors, one file a rank, in verl's names",
    _rank_write.FSDP1: "FSDP1 sharded state dicts, one file a rank",
    FSDP1_LOCAL: "FSDP1 local state dicts (flat parameters), one file a rank",
}
_Ranks = Mapping[int, Tree]


def detect(path: Path) -> str | None:
    if path.is_file():
        name = rank_of(path.name)
        if name is None or path.suffix in (".distcp", ".safetensors"):
            return None
        if name.world_size in (None, 1) and len(_siblings(path)) < 2:
            return None
    elif (path / ".metadata").is_file() or any(path.glob("*.distcp")):
        return None
    sets = named_sets(path)
    files = [file for each in sets for file in each.files.values()]
    return f"{len(files)} rank files such as {files[0].name}" if files else None


def _siblings(path: Path) -> list[Path]:
    own = rank_of(path.name)
    names = ((file, rank_of(file.name)) for file in path.parent.iterdir())
    return [file for file, name in names if name is not None and own is not None and name.stem == own.stem]


def read(path: Path, options: ReadOptions) -> Contents:
    sets = named_sets(path) or unnamed_set(path)
    if not sets:
        raise SourceError(
            f"{path} holds no rank files",
            why="no file there says of which rank it is",
            hint="name the folder that they are in",
        )
    loaded, world_size = load(path, sets)
    parts = _parts(loaded)
    tree, faults = _merged(parts, options)
    if faults:
        raise SourceError(
            f"the rank files in {path} do not make one checkpoint",
            why="what all ranks must hold alike differs, or the parts do not fit: files of different steps or runs",
            hint="restore the files of one save",
            faults=faults,
        )
    facts = _facts(parts, tree)
    evidence = f"{sum(len(each.trees) for each in loaded)} rank files of {world_size} ranks"
    return Contents(NAME, tree, evidence, world_size, facts=facts)


def _parts(loaded: list[Loaded]) -> dict[str, _Ranks]:
    """What the files hold by role or name, each for every rank: `model` and `optimizer` where a file is all one."""
    parts: dict[str, _Ranks] = {}
    for each in loaded:
        first = each.trees[min(each.trees)]
        if _is_model(first) or (isinstance(first, Mapping) and _role(each.kind) == "model" and "model" not in first):
            parts["model"] = each.trees
        elif _is_optimizer(first):
            parts["optimizer"] = each.trees
        elif isinstance(first, Mapping):
            for key in dict.fromkeys(key for tree in each.trees.values() for key in tree):
                name = key if key not in parts else f"{each.kind}.{key}"
                parts[name] = {rank: tree[key] for rank, tree in each.trees.items() if key in tree}
        else:
            parts[each.kind or "value"] = each.trees
    return parts


def _role(kind: str) -> str:
    if "optim" in kind.lower():
        return "optimizer"
    return "model" if "model" in kind.lower() else ""


def _is_model(tree: Tree) -> bool:
    return isinstance(tree, Mapping) and any(isinstance(value, Sharded) for value in tree.values())


def _is_optimizer(tree: Tree) -> bool:
    return isinstance(tree, Mapping) and isinstance(tree.get("state"), Mapping) and "param_groups" in tree


def _merged(parts: Mapping[str, _Ranks], options: ReadOptions) -> tuple[dict[str, Tree], list[str]]:
    hints = options.hints
    merge = Merge()
    out: dict[str, Tree] = {}
    faults: list[str] = []
    models = [name for name, ranks in parts.items() if _is_model(ranks[min(ranks)]) or name == "model"]
    optimizers = [name for name, ranks in parts.items() if _is_optimizer(ranks[min(ranks)])]
    flat = [name for name in models if is_flat(parts[name][min(parts[name])])]
    for name in models:
        if name in flat:
            units = units_of(parts[name], hints.model)
            assert hints.model is not None, "units_of() needs it"
            out[name] = model_of(units, parts[name], hints.model, merge)
        else:
            out[name] = merge.tree(parts[name], (name,))
    for name in optimizers:
        trees = parts[name]
        if flat and hints.model is not None and is_local(trees):
            out[name] = of_units(trees, units_of(parts[flat[0]], hints.model), hints.model, hints, merge)
        elif models and not flat and _is_model(parts[models[0]][0]) and is_local(trees):
            out[name] = of_shapes(trees, _shapes(parts[models[0]][0], out[models[0]]), hints, merge)
        else:
            out[name] = merge.tree(trees, (name,))
    for name in (name for name in parts if name not in out):
        out[name], found = extra(name, parts[name])
        faults += found
    return {name: out[name] for name in parts}, [*merge.lines(), *faults]


def _facts(parts: Mapping[str, _Ranks], tree: Mapping[str, Tree]) -> dict[str, Any]:
    """What FSDP left whole in a sharded model are buffers, unless the optimizer needs some for its ids."""
    for ranks in parts.values():
        first = ranks[min(ranks)]
        if _is_model(first) and not is_flat(first):
            whole = frozenset(key for key, value in first.items() if isinstance(value, Tensor))
            groups = tree["optimizer"].get("param_groups", []) if _is_optimizer(tree.get("optimizer")) else []
            ids = sum(len(group.get("params", ())) for group in groups)
            return {"buffers": whole} if ids <= len(first) - len(whole) else {}
    return {}


def _shapes(files: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The parameters that FSDP sharded, by shape; tied names once."""
    seen: set[object] = set()
    out = {}
    for name, value in files.items():
        tensor = model[name]
        if isinstance(value, Sharded) and isinstance(tensor, Tensor) and tensor.storage not in seen:
            seen |= {tensor.storage} if tensor.storage is not None else set()
            out[name] = tensor.spec.shape
    return out


def layout(contents: Contents, options: WriteOptions) -> Layout:
    write = _rank_local if options.target == FSDP1_LOCAL else _rank_write
    return write.layout(contents, options)


def drops(contents: Contents, options: WriteOptions) -> Iterable[Drop]:
    yield from _rank_write.surplus(contents, options)
    if options.target == FSDP1_LOCAL:
        yield from _rank_local.drops(contents, options)


def warnings(contents: Contents, options: WriteOptions) -> Iterable[str]:
    if options.target == FSDP1_LOCAL and options.use_orig_params:
        yield (
            "with use_orig_params FSDP1 finds its own _flat_param entries unexpected in a local state dict: load it "
            "with model.load_state_dict(..., strict=False); sizes are checked all the same"
        )
