"""Proof by training: the same losses under every strategy, after every conversion, from the old and the new script.

    verify_strategies(MatrixOptions(strategies=("fsdp2",)))     # against a single process
    verify_state(src, dst, MatrixOptions(), to="fsdp2")         # resume both
    verify_scripts(old, new, ScriptOptions(device="cpu"))       # run both, unchanged

Each answers a `Report`. The names are imported when they are used: reading a trace or a report needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .matrix import verify_strategies
    from .options import MatrixOptions
    from .report import Report
    from .script import ScriptOptions, verify_scripts
    from .state import verify_state

__all__ = [
    "MatrixOptions",
    "Report",
    "ScriptOptions",
    "verify_scripts",
    "verify_state",
    "verify_strategies",
]

_HOMES = {
    "MatrixOptions": "options",
    "verify_strategies": "matrix",
    "Report": "report",
    "ScriptOptions": "script",
    "verify_scripts": "script",
    "verify_state": "state",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
