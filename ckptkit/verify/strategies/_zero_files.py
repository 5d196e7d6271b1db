"""DeepSpeed's own checkpoints: the engine's native directories, and universal ones made from them."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from ._extras import extras_of


@dataclass(frozen=True, slots=True)
class ZeroForm:
    save: Callable[[Any, Path], None]
    load: Callable[[Any, Path], None]


def _save_native(run: Any, path: Path) -> None:
    """The engine writes the scheduler itself; what else a script keeps goes into the client state."""
    extras = extras_of(run)
    run.engine.save_checkpoint(str(path), client_state={"note": extras["note"], "rng": extras["rng"]})


def _load_native(run: Any, path: Path) -> None:
    found, _ = run.engine.load_checkpoint(str(path))
    if found is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint in {path}")
    run.done = run.engine.global_steps


def _save_universal(run: Any, path: Path) -> None:
    """Native first, beside the target, then `ds_to_universal` on rank 0, without processes of its own."""
    native = path.with_name(path.name + ".native")
    _save_native(run, native)
    dist.barrier()
    if dist.get_rank() == 0:
        from deepspeed.checkpoint.ds_to_universal import main

        tag = (native / "latest").read_text().strip()
        main(
            argparse.Namespace(
                input_folder=str(native / tag),
                output_folder=str(path / tag),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
        (path / "latest_universal").write_text(tag)
        shutil.rmtree(native)


def _load_universal(run: Any, path: Path) -> None:
    """DeepSpeed leaves buffers and frozen parameters as they are in the engine (0.19.8)."""
    run.engine._config.load_universal_checkpoint = True
    _load_native(run, path)


FORMS: Mapping[str, ZeroForm] = MappingProxyType(
    {"native": ZeroForm(_save_native, _load_native), "universal": ZeroForm(_save_universal, _load_universal)}
)
