"""accelerate: the folder that `Accelerator.save_state` writes.

What: the model as `pytorch_model_fsdp_0/` (sharded), `pytorch_model_fsdp.bin` (full), `pytorch_model_fsdp_rank{R}.bin`
(local), `model.safetensors` or `pytorch_model.bin` (plain and DDP), or DeepSpeed's own folder `pytorch_model/`; the
optimizer as `optimizer_0/` or `optimizer.bin`; beside them `scheduler.bin`, `sampler.bin`, `scaler.pt`,
`dl_state_dict.bin`, `random_states_{R}.pkl` and `custom_checkpoint_{N}.pkl`.

Written: `--to dcp` (FSDP sharded), `--to full` (FSDP with FULL_STATE_DICT), `--to safetensors` (plain and DDP).

Extras that accelerate knows nothing of (a loop's `step`) go to `ckptkit_extras.pt`, which it leaves alone.

Extras: `scheduler`, `sampler`, `scaler`, `dataloader`, `random_states` (by rank), `custom_checkpoint` (by number).

Known limits: a plain folder numbers its optimizer's parameters and sorts its weights by name, so their order must be
given with `--model` or `--param-names`. One model and one optimizer a folder.

Source: accelerate/checkpointing.py, utils/fsdp_utils.py, utils/constants.py (1.15).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..core.checkpoint import Contents, State
from ..core.tree import Tree
from ..errors import SourceError
from ._parts import by_rank, fsdp_parts, model_part, model_state, optimizer_part

NAME = "accelerate"
_FILES = {"scheduler": "scheduler.bin", "sampler": "sampler.bin", "scaler": "scaler.pt",
          "dataloader": "dl_state_dict.bin"}  # fmt: skip
_RANDOM, _CUSTOM = "random_states", "custom_checkpoint"
_OTHERS, _OTHERS_FILE = "ckptkit_extras", "ckptkit_extras.pt"


def find(path: Path) -> Mapping[str, Path] | None:
    """A folder with a model under one of accelerate's names and a file that only accelerate writes."""
    model = model_part(path)
    own = by_rank(path, r"random_states_(\d+)\.pkl")
    sure = own or (path / "scheduler.bin").is_file() or (path / "optimizer.bin").is_file()
    if model is None or not sure or (path / "trainer_state.json").exists():
        return None
    several = [
        name for name in ("model_1.safetensors", "pytorch_model_fsdp_1", "optimizer_1") if (path / name).exists()
    ]
    if several:
        raise SourceError(
            f"{path} holds several models",
            why="one model and one optimizer are carried at a time",
            hint="name the part of one model, with the other files moved out of the folder",
            faults=several,
        )
    parts = {"model": model}
    optimizer = optimizer_part(path, "optimizer.bin")
    if optimizer is not None:
        parts["optimizer"] = optimizer
    parts |= {role: path / name for role, name in _FILES.items() if (path / name).is_file()}
    parts |= {f"{_RANDOM}.{rank}": file for rank, file in own.items()}
    if (path / _OTHERS_FILE).is_file():
        parts[_OTHERS] = path / _OTHERS_FILE
    custom = by_rank(path, r"custom_checkpoint_(\d+)\.pkl")
    return parts | {f"{_CUSTOM}.{number}": file for number, file in custom.items()}


def read(parts: Mapping[str, Contents]) -> State:
    extras: dict[str, Tree] = {role: parts[role].tree for role in _FILES if role in parts}
    for role, contents in parts.items():
        kind, _, number = role.partition(".")
        if kind in (_RANDOM, _CUSTOM):
            extras.setdefault(kind, {})[int(number)] = contents.tree
    if _OTHERS in parts and isinstance(parts[_OTHERS].tree, Mapping):
        extras |= parts[_OTHERS].tree
    return model_state(parts, extras)


def write(state: State, format: str) -> Mapping[str, Contents]:
    parts = fsdp_parts(state, format, plain_optimizer="optimizer.bin", framework=NAME)
    for role, tree in state.extras.items():
        if role in _FILES:
            parts[_FILES[role]] = _torch(tree)
        elif role in (_RANDOM, _CUSTOM):
            parts |= {f"{role}_{number}.pkl": _torch(each) for number, each in tree.items()}
    left = {r: t for r, t in state.extras.items() if r not in (*_FILES, _RANDOM, _CUSTOM)}
    if left:
        # Not among the custom checkpoints: accelerate refuses a folder with more of them than the script registered.
        parts[_OTHERS_FILE] = _torch(left)
    return parts


def _torch(tree: Tree) -> Contents:
    return Contents("full", tree, f"written for {NAME}")
