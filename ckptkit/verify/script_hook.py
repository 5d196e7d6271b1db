"""Enters a stranger's training script from outside: runs at the start of each of its processes, waits for torch.

The launcher puts a folder with a `sitecustomize.py` first on PYTHONPATH, whose one line calls `install()`. Children
inherit the environment, so processes of `mp.spawn` and workers are entered as well. Nothing of torch is imported here:
a process that never imports torch (a resource tracker, a shell tool) pays nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

FOLDER = "CKPTKIT_VERIFY_DIR"  # where the processes of a launch write what they saw
SITE_CUSTOMIZE = """\
import sys
try:
    from ckptkit.verify.script_hook import install
except ImportError as error:
    print(f"ckptkit: the recorder cannot be imported: {error}", file=sys.stderr)
else:
    install(__file__)
"""


def install(own_file: str) -> None:
    """Called by the generated `sitecustomize.py`; runs the sitecustomize that it hides, then arms the import hook."""
    _run_hidden(Path(own_file).parent)
    if FOLDER in os.environ:
        sys.meta_path.insert(0, _AfterImport({"torch": _after_torch, "deepspeed": _after_deepspeed}))


def _after_torch() -> None:
    from .recorder import start

    start()


def _after_deepspeed() -> None:
    from .recorder_deepspeed import attach

    attach()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, right after a module was executed for the first time."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self.actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.actions:
            return None
        action = self.actions.pop(fullname)  # taken out first: the search below comes through here again
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_hidden(own_folder: Path) -> None:
    """Runs the sitecustomize that would have been found without ours (virtual machines and distributions have one)."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != own_folder.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
