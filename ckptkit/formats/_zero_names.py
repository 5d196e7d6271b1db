"""The files of a DeepSpeed checkpoint by their names: the tag folder, which ranks are there, and what is refused.

Source: `_get_ckpt_name`, `_get_zero_ckpt_prefix`, `_get_expert_ckpt_name`, `_get_optimizer_ckpt_name` in
deepspeed/runtime/engine.py, `PipelineModule.ckpt_layer_path` in runtime/pipe/module.py (0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import SourceError

LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<tensor>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?P<low>(?:bf16_|fp16_)?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<tensor>\d+)_?optim_states\.pt")
_REFUSED = (
    (re.compile(r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt|expert_\d+_mp_rank_\d+_model_states\.pt"),
     "experts (MoE), whose files hold other parts on other ranks"),
    (re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt"), "optimizer states by expert-parallel rank (MoE)"),
    (re.compile(r"layer_\d+-.*model_states\.pt"), "layers of a pipeline"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Files:
    """What a tag folder holds. `models` and `optims` are by rank; at ZeRO 0 to 2 there is one model file, of rank 0."""

    folder: Path
    models: Mapping[int, Path]
    optims: Mapping[int, Path]
    partitioned: bool
    prefix: str

    @property
    def evidence(self) -> str:
        kind = "zero_pp_rank_*_model_states.pt" if self.partitioned else "mp_rank_00_model_states.pt"
        optims = f"{len(self.optims)} *_optim_states.pt" if self.optims else "no optimizer files"
        return f"{self.folder.name}/: {len(self.models)} {kind}, {optims}"


def model_file(rank: int, *, partitioned: bool) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if partitioned else "mp_rank_00_model_states.pt"


def optim_file(rank: int, *, prefix: str) -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def tag_folder(path: Path, pointer: str = LATEST) -> Path:
    """The folder of the checkpoint: the one that the pointer file of a run names, or the path itself.

    Raises SourceError where the pointer leaves the run's folder or names one that is not there.
    """
    file = path / pointer
    if not file.is_file():
        return path
    try:
        tag = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {file}", why=str(error), hint="name the tag's folder itself") from error
    parts = PurePosixPath(tag.replace("\\", "/")).parts
    if not parts or ".." in parts or parts[0].endswith((":", "/")) or "\0" in tag:
        raise SourceError(
            f"{file} points to {tag[:80]!r}",
            why="a tag is a folder below the run's own; this one would be read from elsewhere",
            hint="name the tag's folder itself",
        )
    folder = path.joinpath(*parts)
    if not folder.is_dir():
        raise SourceError(
            f"{file} points to {tag!r}, which is not there",
            why="the step was moved or removed",
            hint="name one of the tag folders that are there",
        )
    return folder


def has_files(folder: Path) -> bool:
    """Whether the folder holds model or optimizer files of DeepSpeed, by names alone."""
    return any(_MODEL.fullmatch(name) or _OPTIM.fullmatch(name) or _refusal(name) for name in _listed(folder))


def _listed(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []


def _refusal(name: str) -> str | None:
    return next((reason for pattern, reason in _REFUSED if pattern.fullmatch(name)), None)


def find_files(folder: Path) -> Files:
    """The files of a tag folder by rank. Raises SourceError for what is not supported, or is of two checkpoints."""
    names = _listed(folder)
    _refuse(folder, names)
    models = [found for name in names if (found := _MODEL.fullmatch(name))]
    optims = [found for name in names if (found := _OPTIM.fullmatch(name))]
    by_rank = {found["rank"] is not None for found in models}
    prefixes = sorted({found["low"] for found in optims})
    if len(by_rank) > 1 or len(prefixes) > 1:
        raise SourceError(
            f"{folder} holds the files of two checkpoints",
            why="ZeRO-3 and other model files lie side by side, or bf16_ and other optimizer files",
            hint="move the older ones away",
            faults=[found.string for found in (*models, *optims)],
        )
    if not models:
        raise SourceError(
            f"{folder} holds optimizer files and no model file",
            why="buffers, names and shapes are in it",
            hint="restore the *_model_states.pt",
        )
    return Files(
        folder,
        {int(found["rank"] or 0): folder / found.string for found in models},
        {int(found["rank"]): folder / found.string for found in optims},
        by_rank == {True},
        prefixes[0] if prefixes else "",
    )


def _refuse(folder: Path, names: list[str]) -> None:
    matches = [found for name in names for rule in (_MODEL, _OPTIM) if (found := rule.fullmatch(name))]
    faults = [f"{name}: {reason}" for name in names if (reason := _refusal(name))]
    faults += [f"{found.string}: tensor-parallel rank {found['tensor']}" for found in matches if int(found["tensor"])]
    if "offloaded_tensors" in names:
        faults.append("offloaded_tensors: optimizer states swapped to NVMe, outside of the checkpoint's own files")
    if faults:
        raise SourceError(
            f"{folder} was written by a run that is more than data parallel",
            why="tensor, pipeline and expert parallelism and NVMe offload are not supported: their parts are not "
            "cut by the rules of ZeRO alone",
            hint="save it once without them, or bring it to universal form with DeepSpeed's own tools",
            faults=faults[:20],
        )
