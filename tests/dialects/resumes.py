"""Resuming: a framework loads a folder that ckptkit wrote and trains on, beside the run that was never interrupted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from fixtures.make import find


def continued(folder: Path) -> list[float]:
    """The losses of the uninterrupted run after its checkpoint."""
    return json.loads((folder / "continue.json").read_text())["losses"]


def resumed(pool: Any, like: str, folder: Path, world_size: int) -> list[float]:
    """The losses after `folder`/<the fixture's path>, loaded by the framework of the fixture `like` on new weights."""
    fixture = find(like)
    module = fixture.job.partition(":")[0]
    assert hasattr(importlib.import_module(module), "resume")
    return pool.run(f"{module}:resume", world_size=world_size, fixture=fixture, out=str(folder))[0]
