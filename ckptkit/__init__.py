"""ckptkit: move training runs between PyTorch DDP, FSDP1, FSDP2 and DeepSpeed, and prove that the losses go on.

    ck = ckptkit.open(path)                       # names, shapes, groups, extras; no tensor bytes
    ck.read("layers.0.weight", "exp_avg")         # one whole tensor
    ckptkit.convert(src, dst, to="dcp", world_size=3)
    ckptkit.diff(a, b)
    ckptkit.load(path, model, optimizer)          # into a live model of any strategy, each rank its own boxes
    ckptkit.save(path, model, optimizer, format="zero2", world_size=8)

The names are imported when they are used: `import ckptkit` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion import ConvertReport, convert
    from .difference import DiffReport, diff
    from .live.load import LoadReport, load
    from .live.save import save
    from .opened import OpenCheckpoint
    from .opening import open

__version__ = "0.1.0"
__all__ = [
    "ConvertReport",
    "DiffReport",
    "LoadReport",
    "OpenCheckpoint",
    "convert",
    "diff",
    "load",
    "open",
    "save",
]

_HOMES = {
    "open": "opening",
    "OpenCheckpoint": "opened",
    "convert": "conversion",
    "ConvertReport": "conversion",
    "diff": "difference",
    "DiffReport": "difference",
    "load": "live.load",
    "LoadReport": "live.load",
    "save": "live.save",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
