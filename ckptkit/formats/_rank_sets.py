"""Which files of a folder are one rank's each: sets by name, the rank and world size of every file, what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.rank_names import rank_of
from ..core.tree import Tree
from ..errors import SourceError
from ..io.torch_file import is_torch_file
from ._rank_parts import load_parts, sharded_leaves

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", "")
_DEEPSPEED = re.compile(r"mp_rank_|_optim_states|_model_states")
_NOISE = re.compile(r"world[_-]?size[_-]?\d+|(?<![a-z])ws[_-]?\d+|rank[_-]?\{\}|r?\{\}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankSet:
    """Files that belong together, by rank; `kind` is what their names have in common beside rank and world size."""

    kind: str
    files: Mapping[int, Path]
    world_size: int | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The trees of a set's files by rank."""

    kind: str
    trees: Mapping[int, Tree]


def named_sets(path: Path) -> list[RankSet]:
    """The sets of a folder, or the one set that a file belongs to, by names alone.

    Raises SourceError where files of one kind are of two world sizes.
    """
    folder = path if path.is_dir() else path.parent
    own = None if path.is_dir() else rank_of(path.name)
    stems: dict[str, dict[int, Path]] = {}
    sizes: dict[str, int | None] = {}
    for file in sorted(folder.iterdir()):
        name = rank_of(file.name) if file.is_file() and file.suffix in _SUFFIXES else None
        if name is None or _DEEPSPEED.search(file.name) or (own is not None and name.stem != own.stem):
            continue
        if own is not None or is_torch_file(file):
            stems.setdefault(name.stem, {})[name.rank] = file
            sizes[name.stem] = name.world_size
    sets = [RankSet(_kind(stem), files, sizes[stem]) for stem, files in stems.items()]
    doubled = [kind for kind in {each.kind for each in sets} if sum(each.kind == kind for each in sets) > 1]
    if doubled:
        raise SourceError(
            f"{folder} holds rank files of more than one save",
            why="files of one kind are there for different world sizes, or under two ways to write the rank",
            hint="name one of the files, or move one save into a folder of its own",
            faults=[stem.replace("{}", "*") for stem in stems if _kind(stem) in doubled],
        )
    return sets


def _kind(stem: str) -> str:
    text = _NOISE.sub("", stem.rpartition(".")[0] or stem)
    return re.sub(r"[_\-.]{2,}", "_", text).strip("_-. ")


def unnamed_set(path: Path) -> list[RankSet]:
    """All torch files of a folder as one set whose ranks are told from the contents: their names say nothing."""
    files = sorted(file for file in path.iterdir() if file.is_file() and is_torch_file(file)) if path.is_dir() else []
    ranks: dict[int, Path] = {}
    for file in files:
        said = {leaf.rank for leaf in sharded_leaves(load_parts(file))} - {None}
        if len(said) != 1:
            raise SourceError(
                f"neither the name nor the contents of {file} say of which rank it is",
                why="files of one run carry their rank in one of the two",
                hint="name them ..._rank_0.pt, ..._rank_1.pt",
            )
        rank = int(said.pop() or 0)
        if rank in ranks:
            raise SourceError(
                f"{file} and {ranks[rank]} are both of rank {rank}",
                why="files of two runs lie together",
                hint="keep one file a rank",
            )
        ranks[rank] = file
    return [RankSet("", ranks, None)] if ranks else []


def load(path: Path, sets: Iterable[RankSet]) -> tuple[list[Loaded], int]:
    """The trees of all sets, and the world size. Raises SourceError naming every rank that is missing and every file
    that is of another rank or world size than its name or the other files say."""
    found = [(each, {rank: load_parts(file) for rank, file in each.files.items()}) for each in sets]
    faults: list[str] = []
    sizes: dict[int, str] = {}
    for each, trees in found:
        if each.world_size is not None:
            sizes.setdefault(each.world_size, f"the name of {each.files[min(each.files)].name}")
        for rank, tree in trees.items():
            leaves = sharded_leaves(tree)
            file = each.files[rank].name
            faults += [f"{file} holds the shards of rank {r}" for r in {leaf.rank for leaf in leaves} - {None, rank}]
            for size in {leaf.world_size for leaf in leaves} - {None}:
                sizes.setdefault(int(size or 0), f"the tensors in {file}")
    if len(sizes) > 1:
        faults += [f"the world size is {size} by {said}" for size, said in sorted(sizes.items())]
    world_size = max([*sizes, *(max(each.files) + 1 for each, _ in found)])
    for each, trees in found:
        some = each.files[min(each.files)].name
        faults += [f"rank {rank} of {some} is missing" for rank in range(world_size) if rank not in trees]
    if faults:
        raise SourceError(
            f"{path} does not hold the files of all {world_size} ranks of one save",
            why="each rank's file holds a part that no other has",
            hint="copy the files of all ranks of one save",
            faults=faults,
        )
    return [Loaded(each.kind, trees) for each, trees in found], world_size
