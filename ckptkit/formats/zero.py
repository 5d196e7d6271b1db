"""zero: DeepSpeed's own checkpoints of ZeRO 0, 1, 2 and 3.

What: a run's folder with `latest`, or the folder of one tag. ZeRO 1 and 2 keep one model file, and an optimizer file a
rank: each group of parameters is one fp32 vector, padded and cut into equal partitions. ZeRO 3 cuts every parameter on
its own and keeps the weights in the optimizer files alone. fp32, bf16 (BF16_Optimizer too), fp16 with its loss scaler;
DeepSpeed 0.8 to 0.19. DeepSpeed need not be installed.

Read: weights, fp32 masters where the weights are of lower precision, optimizer states of any optimizer that keeps its
state flat beside the parameters, groups, buffers, frozen and tied parameters, scheduler, steps, client state.

Not supported, and refused by name: tensor, pipeline and expert parallelism, states swapped to NVMe.
"""

from __future__ import annotations

from pathlib import Path

from ..core.checkpoint import Contents
from ..core.options import ReadOptions
from ..errors import SourceError
from ._zero_names import find_files, has_files, tag_folder
from ._zero_read import read_files

NAME = "zero"
DIALECT = "deepspeed"
MASTERS = True


def detect(path: Path) -> str | None:
    """By file names alone; a folder with `zero/optimizer_state.pt` is a universal checkpoint."""
    if not path.is_dir():
        return None
    try:
        folder = tag_folder(path)
    except SourceError:
        return "a file named latest"
    if not has_files(folder) or (folder / "zero" / "optimizer_state.pt").exists():
        return None
    try:
        return find_files(folder).evidence
    except SourceError as error:
        return error.what


def read(path: Path, options: ReadOptions) -> Contents:
    return read_files(find_files(tag_folder(path)), options)
