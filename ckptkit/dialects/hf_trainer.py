"""hf-trainer: the folder `checkpoint-N` of the Hugging Face Trainer.

What: `model.safetensors` (or `pytorch_model.bin`, either with an index), `optimizer.pt` with integer ids,
`scheduler.pt`, `scaler.pt`, `rng_state.pth` or `rng_state_{R}.pth`, `trainer_state.json`; with FSDP the model and
optimizer under accelerate's names, with DeepSpeed `global_stepN/` and `latest`.

The order of the ids: the Trainer gives the optimizer two groups, with and without weight decay, each in the order of
the model. A safetensors file is sorted by name, so the model's order comes from `config.json` (transformers builds the
model on the meta device), else from `--model` or `--param-names`.

Written: `--to safetensors` (plain and DDP), `--to dcp` (FSDP sharded), `--to full` (FSDP with FULL_STATE_DICT).
`config.json`, the tokenizer and `training_args.bin` are not written: they belong to the script, not to its state.

Extras: `scheduler`, `scaler`, `rng` (by rank), `trainer_state`; `step` is its `global_step`.

Source: transformers/trainer.py `_save_checkpoint`, `_load_optimizer_and_scheduler` (5.24).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..core.checkpoint import Contents, Drop, State
from ..core.tree import Tree
from ._parts import by_rank, fsdp_parts, model_part, model_state, optimizer_part

NAME = "hf-trainer"
_STATE, _CONFIG = "trainer_state.json", "config.json"
_FILES = {"scheduler": "scheduler.pt", "scaler": "scaler.pt"}


def find(path: Path) -> Mapping[str, Path] | None:
    """A folder with `trainer_state.json` and a model."""
    model = model_part(path)
    if model is None or not (path / _STATE).is_file():
        return None
    parts = {"model": model, "trainer_state": path / _STATE}
    optimizer = optimizer_part(path, "optimizer.pt")
    if optimizer is not None:
        parts["optimizer"] = optimizer
    if (path / _CONFIG).is_file():
        parts["config"] = path / _CONFIG
    parts |= {role: path / name for role, name in _FILES.items() if (path / name).is_file()}
    if (path / "rng_state.pth").is_file():
        parts["rng.0"] = path / "rng_state.pth"
    return parts | {f"rng.{rank}": file for rank, file in by_rank(path, r"rng_state_(\d+)\.pth").items()}


def read(parts: Mapping[str, Contents]) -> State:
    extras: dict[str, Tree] = {role: parts[role].tree for role in _FILES if role in parts}
    rng = {int(role.partition(".")[2]): each.tree for role, each in parts.items() if role.startswith("rng.")}
    if rng:
        extras["rng"] = rng
    trainer = dict(parts["trainer_state"].tree)
    extras |= {"trainer_state": trainer, "step": int(trainer.get("global_step", 0))}
    state = model_state(parts, extras)
    if "config" in parts and not state.ordered:
        from ..io.hf_model import parameter_order

        order = parameter_order(parts["config"].tree)
        state = replace(state, parameters=order) if order is not None else state
    return state


def drops(state: State, format: str) -> Iterator[Drop]:
    """The Trainer keeps no other extras; what a callback keeps is inside `trainer_state`."""
    known = (*_FILES, "rng", "trainer_state", "step")
    for name, tree in state.extras.items():
        if name not in known:
            yield Drop(name, "the Trainer's folder has no place for it")
        elif name == "rng" and not _by_rank(tree):
            yield Drop(name, "it is not by rank, as the Trainer's files of random states are")


def _by_rank(tree: Tree) -> Mapping[int, Tree]:
    return tree if isinstance(tree, Mapping) and all(isinstance(rank, int) for rank in tree) else {}


def write(state: State, format: str) -> Mapping[str, Contents]:
    parts = fsdp_parts(state, format, plain_optimizer="optimizer.pt", framework=NAME)
    for role, name in _FILES.items():
        if role in state.extras:
            parts[name] = Contents("full", state.extras[role], f"written for {NAME}")
    by_number = _by_rank(state.extras.get("rng", {}))
    for rank, tree in by_number.items():
        name = "rng_state.pth" if len(by_number) == 1 else f"rng_state_{rank}.pth"
        parts[name] = Contents("full", tree, f"written for {NAME}")
    step = state.extras.get("step", 0)
    trainer = {"global_step": step, **state.extras.get("trainer_state", {})}
    parts[_STATE] = Contents("json", trainer, f"written for {NAME}")
    return parts
