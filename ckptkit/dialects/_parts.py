"""Parts of folders that several frameworks share: accelerate's file names, one part read as a model or optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.checkpoint import Contents, State
from ..core.disassemble import numbered
from ..core.tree import Tree, is_tensors, outline
from ..errors import SourceError, UsageError

# accelerate/utils/constants.py and fsdp_utils.py (1.15): sharded folders, whole files, one file a rank, plain files.
_MODEL = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "model.safetensors.index.json", "model.safetensors",
          "pytorch_model.bin.index.json", "pytorch_model.bin")  # fmt: skip
_MODEL_RANKS = ("pytorch_model_fsdp_0_rank*.bin", "pytorch_model_fsdp_rank*.bin")


def model_part(folder: Path) -> Path | None:
    """The part of a folder that holds the model: a folder, a file, the first of a set of rank files, DeepSpeed's folder
    of the step that `latest` names, or the folder itself where Hugging Face's names are used.

    DeepSpeed's comes first: the Trainer writes its weights beside it once more.
    """
    latest = folder / "latest"
    tag = latest.read_text().strip() if latest.is_file() else ""
    if tag and Path(tag).name == tag and any((folder / tag).glob("*_states.pt")):
        return folder / tag
    for name in _MODEL:
        if (folder / name).exists():
            plain = name.startswith(("model.", "pytorch_model.bin"))
            return folder if plain else folder / name
    ranks = [path for pattern in _MODEL_RANKS for path in sorted(folder.glob(pattern))]
    return ranks[0] if ranks else None


def optimizer_part(folder: Path, plain: str) -> Path | None:
    """The part that holds the optimizer; `plain` is the framework's name for a single file."""
    for name in ("optimizer_0", plain, "optimizer.bin", "optimizer.pt"):
        if (folder / name).exists():
            return folder / name
    return next(iter(sorted(folder.glob("optimizer_0_rank*.bin"))), None)


def by_rank(folder: Path, pattern: str) -> dict[int, Path]:
    """Files with a number in their names, by that number: `pattern` is a regular expression with one group."""
    found = ((re.fullmatch(pattern, path.name), path) for path in folder.iterdir())
    return {int(match.group(1)): path for match, path in sorted(found, key=lambda item: item[1].name) if match}


def model_of(contents: Contents) -> dict[str, Any]:
    """The model's flat state dict of a part, bare or under `model`."""
    tree = contents.tree
    if isinstance(tree, Mapping) and is_tensors(tree.get("model")):
        tree = tree["model"]
    if not is_tensors(tree):
        raise SourceError(
            "the part that should hold the model holds no state dict",
            why=f"it saw {outline(tree)} ({contents.evidence})",
            hint="name the model's part itself, or --dialect another framework",
        )
    return dict(tree)


def optimizer_of(contents: Contents) -> Tree:
    """The optimizer's state of a part, bare or under `optimizer`."""
    tree = contents.tree
    return tree["optimizer"] if isinstance(tree, Mapping) and "optimizer" in tree else tree


def model_state(parts: Mapping[str, Contents], extras: Mapping[str, Tree]) -> State:
    """A state from the parts `model` and `optimizer`, and the extras of the other files of the folder."""
    model = parts["model"]
    warnings = tuple(text for contents in parts.values() for text in contents.warnings)
    if model.format == "zero":
        # DeepSpeed's files hold all roles; what the engine keeps beside them are extras already.
        roles = dict(model.tree)
        weights, optimizer, masters = roles.pop("model"), roles.pop("optimizer", None), roles.pop("master", {})
        return State(weights, optimizer, masters, {**roles, **extras}, warnings=warnings, **model.facts)
    optimizer = optimizer_of(parts["optimizer"]) if "optimizer" in parts else None
    return State(model_of(model), optimizer, extras=extras, warnings=warnings, **model.facts)


def fsdp_parts(state: State, format: str, *, plain_optimizer: str, framework: str) -> dict[str, Contents]:
    """The model and optimizer of a state under the names that accelerate gives them for a container.

    dcp: sharded FSDP; full: FSDP with FULL_STATE_DICT; safetensors: a plain or DDP run, with integer optimizer ids.
    Raises UsageError for another container.
    """
    facts = {"aliases": state.aliases, "buffers": state.buffers, "frozen": state.frozen}
    model: Tree = dict(state.model)
    names = {"dcp": ("pytorch_model_fsdp_0", "optimizer_0"), "full": ("pytorch_model_fsdp.bin", "optimizer.bin"),
             "safetensors": ("", plain_optimizer)}  # fmt: skip
    if format not in names:
        raise UsageError(
            f"{framework} does not write {format}",
            why="it would not load what is written",
            hint=f"--to {', '.join(names)}, or another --dialect",
        )
    where, beside = names[format]
    wrapped = {"model": model} if format != "full" else model
    parts = {where: Contents(format, wrapped, f"written for {framework}", facts=facts)}
    if state.optimizer is not None:
        optimizer: Tree = state.optimizer
        if format == "safetensors":
            optimizer = numbered(optimizer)
        elif format == "dcp":
            optimizer = {"optimizer": optimizer}
        container = "dcp" if format == "dcp" else "full"
        parts[beside] = Contents(container, optimizer, f"written for {framework}", facts=facts)
    return parts
