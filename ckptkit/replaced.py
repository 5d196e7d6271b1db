"""What `--overwrite` would remove besides a checkpoint: then it is refused, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from .errors import ExistsError, SourceError
from .opening import find_source

# What checkpoints of all formats and frameworks are made of; anything else in a folder is a person's.
_DATA = frozenset({".pt", ".pth", ".bin", ".ckpt", ".distcp", ".safetensors", ".pkl"})
_ABOUT = frozenset({
    ".metadata", "latest", "latest_universal", "zero_to_fp32.py", "trainer_state.json", "fsdp_config.json",
    "model.safetensors.index.json", "optimizer.safetensors.index.json", "pytorch_model.bin.index.json",
})  # fmt: skip


def check_replaced(target: Path, new: set[str]) -> None:
    """`--overwrite` replaces a checkpoint: a folder goes as a whole, and may hold a person's other things.

    `new` are the files that will be there, by their names below the folder: those are replaced, not lost.
    Raises ExistsError with what would be lost.
    """
    if not target.is_dir() or target.is_symlink() or not any(target.iterdir()):
        return
    hint = f"name a target in it, {target / 'converted'} for example, or remove it yourself"
    try:
        find_source(target, "auto", "auto")
    except SourceError as error:
        raise ExistsError(
            f"{target} is a folder of other things than one checkpoint",
            why=f"--overwrite would remove all of it; {error.why}", hint=hint,
        ) from error  # fmt: skip
    lost = sorted(
        str(path.relative_to(target)) for path in target.rglob("*")
        if not path.is_dir() and path.suffix not in _DATA and path.name not in _ABOUT
        and str(path.relative_to(target)) not in new
    )  # fmt: skip
    if lost:
        raise ExistsError(
            f"{target} holds {len(lost)} files beside its checkpoint",
            why="--overwrite would remove them", hint=hint, faults=lost[:20],
        )  # fmt: skip
