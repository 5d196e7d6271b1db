"""`ckptkit explain`: prints the page of a rule, a format or a dialect, which is its module docstring."""

from __future__ import annotations

import ast
import difflib
import json
from pathlib import Path
from typing import Annotated

import typer

NAME = "explain"
_FOLDERS = (
    ("rule", "migrate/rules"),
    ("rule", "migrate/configs"),
    ("format", "formats"),
    ("dialect", "dialects"),
    ("strategy", "verify/strategies"),
)


def command(
    name: Annotated[str, typer.Argument(help="A rule, format, dialect or strategy; without it all names.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print what a rule, format or dialect does: what, why, before, after, what differs in numbers, known limits."""
    from ckptkit.errors import UsageError

    found = pages()
    wanted = name.replace("_", "-")
    if not name:
        names = sorted((kind, one) for one, (kind, _) in found.items())
        if as_json:
            typer.echo(json.dumps({"schema": 1, "names": [{"kind": kind, "name": one} for kind, one in names]}))
        else:
            for kind, one in names:
                typer.echo(f"{kind:10} {one:26} {found[one][1].splitlines()[0]}")
        return
    if wanted not in found:
        near = difflib.get_close_matches(wanted, found, n=1)
        raise UsageError(
            f"no rule, format, dialect or strategy is called {name!r}",
            why="each has the name of its file",
            hint=f"did you mean {near[0]}?" if near else "ckptkit explain lists all names",
        )
    kind, page = found[wanted]
    if as_json:
        typer.echo(json.dumps({"schema": 1, "kind": kind, "name": wanted, "page": page}))
    else:
        typer.echo(page)


def pages() -> dict[str, tuple[str, str]]:
    """Name -> (kind, page) of everything that has one. Sources are read, not imported: no torch for a page of text."""
    import ckptkit.errors

    root = Path(ckptkit.errors.__file__).parent
    found: dict[str, tuple[str, str]] = {}
    for kind, folder in _FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            page = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if page and not path.stem.startswith("_"):
                name = path.stem.replace("_", "-")
                # A strategy may have the name of the format that it writes: both pages are shown.
                kinds, pages_before = found.get(name, ("", ""))
                found[name] = (f"{kinds}, {kind}".lstrip(", "), f"{pages_before}\n\n{page}".lstrip())
    leftover = ast.get_docstring(ast.parse((root / "migrate/leftover.py").read_text(encoding="utf-8")))
    found["leftover"] = ("rule", leftover or "")
    return found
