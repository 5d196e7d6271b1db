"""zero: DeepSpeed's own checkpoints of ZeRO 0, 1, 2 and 3.

What: a run's folder with `latest`, or the folder of one tag. ZeRO 1 and 2 keep one model file, and an optimizer file a
rank: each group of parameters is one fp32 vector, padded and cut into equal partitions. ZeRO 3 cuts every parameter on
its own and keeps the weights in the optimizer files alone. fp32, bf16 (BF16_Optimizer too), fp16 with its loss scaler;
DeepSpeed 0.8 to 0.19. DeepSpeed need not be installed.

Read: weights, fp32 masters where the weights are of lower precision, optimizer states of any optimizer that keeps its
state flat beside the parameters, groups, buffers, frozen and tied parameters, scheduler, steps, client state.

Written: `--to zero0`, `zero1`, `zero2`, `zero3`, for `--world-size` ranks: what `engine.load_checkpoint` takes without
a flag, and DeepSpeed's own `zero_to_fp32` reads. `--dtype bf16` (or fp16) keeps fp32 masters beside the weights.
`--ds-config` gives what changes the files: sub_group_size, parameter_alignment, round_robin_gradients, DeepSpeed's own
Adam. An engine with elastic_checkpoint or BF16_Optimizer takes the same files.

Not supported, and refused by name: tensor, pipeline and expert parallelism, states swapped to NVMe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ..core.checkpoint import Contents, Drop
from ..core.layout import Layout
from ..core.options import ReadOptions, WriteOptions
from ..errors import SourceError
from ._zero_config import read_config
from ._zero_names import find_files, has_files, tag_folder
from ._zero_read import read_files
from ._zero_source import Source, sort
from ._zero_write import native_layout

NAME = "zero"
DIALECT = "deepspeed"
MASTERS = True
TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "zero0": "an engine without ZeRO: one file",
        "zero1": "optimizer states cut over the ranks",
        "zero2": "gradients too",
        "zero3": "parameters too",
    }
)


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


def layout(contents: Contents, options: WriteOptions) -> Layout:
    """Native files. Raises UsageError where the stage or the precision is not clear."""
    return native_layout(_source(contents, options), read_config(options))


def drops(contents: Contents, options: WriteOptions) -> Iterable[Drop]:
    return _source(contents, options).drops


def warnings(contents: Contents, options: WriteOptions) -> Iterable[str]:
    return _source(contents, options).warnings


def _source(contents: Contents, options: WriteOptions) -> Source:
    return sort(contents, options, read_config(options))
