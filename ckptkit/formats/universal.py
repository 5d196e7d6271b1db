"""universal: DeepSpeed's universal checkpoints, one folder a parameter.

What: `latest_universal` and a tag folder with `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`,
`zero/optimizer_state.pt` and copies of the model files. ZeRO 1 and 2 keep tensors in their shapes, ZeRO 3 keeps them
flat; DeepSpeed does not load one form into the other's engine.

Written: `--to universal` (for ZeRO 1 and 2) and `--to universal3`; an engine with `checkpoint.load_universal` loads
them at any number of ranks.

What DeepSpeed (0.19.8) then does not restore, though it is in the files: buffers and frozen parameters keep their
initial values; at ZeRO 3 every group gets the hyper-parameters of the first, and all share one step counter, which
optimizers of torch then count once a group. The native target (`--to zero2`, `zero3`) has none of these faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ..core.checkpoint import Contents, Drop
from ..core.layout import Layout
from ..core.options import ReadOptions, WriteOptions
from ..errors import SourceError
from ._universal_read import read_universal
from ._universal_write import POINTER, universal_config, universal_drops, universal_layout, universal_warnings
from ._zero_names import find_files, tag_folder
from ._zero_source import Source, sort

NAME = "universal"
DIALECT = "deepspeed"
MASTERS = True
TARGETS: Mapping[str, str] = MappingProxyType({"universal3": "the form that an engine at ZeRO 3 loads"})


def detect(path: Path) -> str | None:
    """By the pointer file and by `zero/optimizer_state.pt`."""
    if not path.is_dir():
        return None
    try:
        folder = _folder(path)
    except SourceError:
        return f"a file named {POINTER}" if (path / POINTER).is_file() else None
    if folder is None:
        return None
    return f"{folder.name}/zero/optimizer_state.pt, {sum(1 for _ in (folder / 'zero').glob('*/fp32.pt'))} parameters"


def _folder(path: Path) -> Path | None:
    """The tag folder, by either pointer or itself; None where it is not universal."""
    pointer = POINTER if (path / POINTER).is_file() else "latest"
    folder = tag_folder(path, pointer)
    return folder if (folder / "zero" / "optimizer_state.pt").is_file() else None


def read(path: Path, options: ReadOptions) -> Contents:
    folder = _folder(path)
    if folder is None:
        raise SourceError(
            f"{path} is no universal checkpoint", why="it has no zero/optimizer_state.pt", hint="--from another format"
        )
    return read_universal(find_files(folder), options)


def layout(contents: Contents, options: WriteOptions) -> Layout:
    """The files of either form. Raises UsageError where stage or precision are not the configuration's."""
    return universal_layout(_source(contents, options), universal_config(options))


def drops(contents: Contents, options: WriteOptions) -> Iterable[Drop]:
    return universal_drops(_source(contents, options), universal_config(options))


def warnings(contents: Contents, options: WriteOptions) -> Iterable[str]:
    return universal_warnings(_source(contents, options), universal_config(options))


def _source(contents: Contents, options: WriteOptions) -> Source:
    return sort(contents, options, universal_config(options))
