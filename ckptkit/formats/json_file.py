"""json: a JSON file as one part of a folder (`trainer_state.json`); never a checkpoint of its own."""

from __future__ import annotations

import json
from pathlib import Path

from ..core.checkpoint import Contents
from ..core.layout import Layout, OutFile, Raw
from ..core.options import ReadOptions, WriteOptions
from ..errors import SourceError

NAME = "json"
PART_ONLY = True


def detect(path: Path) -> str | None:
    """Never found by itself: a folder's dialect names its JSON files."""
    return None


def read(path: Path, options: ReadOptions) -> Contents:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} is no JSON file", why=str(error), hint="copy it again") from error
    return Contents(NAME, tree, "a JSON file")


def layout(contents: Contents, options: WriteOptions) -> Layout:
    text = json.dumps(contents.tree, indent=2, sort_keys=True) + "\n"
    return Layout((OutFile("file.json", (Raw(text.encode()),)),), is_file=True)
