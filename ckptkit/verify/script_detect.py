"""How a training script wants to be launched: by torchrun, which makes the processes, or alone, making its own."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Literal

from ..errors import SourceError

Launch = Literal["torchrun", "spawn"]
RANK_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}


def detect_launch(script: Path) -> tuple[Launch, str]:
    """The launch and its evidence. A script that reads its rank from the environment is torchrun's even if it could
    spawn; one that spawns processes and does not is its own launcher; anything else is torchrun's.

    Raises SourceError if the file is missing or not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's about the user's code: it says them when it runs
            tree = ast.parse(script.read_bytes())
    except FileNotFoundError as error:
        raise SourceError(f"{script} does not exist") from error
    except (SyntaxError, ValueError) as error:
        raise SourceError(f"{script} is not a Python script", why=str(error)) from error
    read = sorted({name for node in ast.walk(tree) for name in _rank_read(node)})
    if read:
        return "torchrun", f"reads {', '.join(read)} from the environment"
    spawned = next((line for node in ast.walk(tree) if (line := _spawn_line(node))), None)
    if spawned is not None:
        return "spawn", f"starts its own processes (line {spawned})"
    return "torchrun", "starts no processes of its own"


def _rank_read(node: ast.AST) -> set[str]:
    """RANK and its like in os.environ["RANK"] (read, not assigned), os.environ.get("RANK") or os.getenv("RANK")."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _ends_with(node.value, "environ"):
        return _named(node.slice)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        from_environ = isinstance(node.func, ast.Attribute) and _ends_with(node.func.value, "environ")
        if node.args and (name == "getenv" or (name == "get" and from_environ)):
            return _named(node.args[0])
    return set()


def _named(node: ast.expr) -> set[str]:
    return {node.value} & RANK_NAMES if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def _ends_with(node: ast.expr, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)


def _spawn_line(node: ast.AST) -> int | None:
    """The line of a call that starts processes."""
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    has_target = any(keyword.arg == "target" for keyword in node.keywords)
    return node.lineno if name in ("spawn", "start_processes") or (name == "Process" and has_target) else None
