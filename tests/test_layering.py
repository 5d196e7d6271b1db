"""The architecture, read from the sources: who imports whom, how modules open, their lengths and names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ckptkit"
MODULES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "cli").glob("*.py")])

# What each room may import, besides itself: cli -> verify | migrate | formats | dialects -> core, io -> errors.
_CORE = {"core", "errors"}
_TOP = {"core", "io", "errors"}
_API = {path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__", "errors")}
_OPEN = {*_TOP, "formats", "dialects", *_API, "__init__"}
MAY_IMPORT = {
    "errors": set(), "core": {"errors"}, "io": _CORE, "formats": _TOP, "dialects": _TOP, "migrate": {"errors"},
    **dict.fromkeys(_API, _OPEN), "verify": _OPEN, "live": _OPEN, "__init__": {*_OPEN, "verify", "migrate", "live"},
    "cli": {*_OPEN, "verify", "migrate", "live"}, "__main__": {"cli"},
}  # fmt: skip
FORBIDDEN = re.compile(r"(^|_)(util|utils|helper|helpers|manager|processor|handler|misc|common|base)s?($|_)")
LIMIT = 400  # lines; past it a file is two things


def name_of(path: Path) -> str:
    """`ckptkit.io.stage`; the command line is installed as `ckptkit.cli`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = ["ckptkit", *parts] if parts[0] == "cli" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, by absolute name; also the names taken from packages."""
    package = name_of(path).split(".") if path.name == "__init__.py" else name_of(path).split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def room(module: str) -> str:
    """The part of the architecture that a module of ckptkit is in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_imports_point_one_way(path: Path) -> None:
    own = room(name_of(path))
    # `__version__` and the public functions are in the package itself.
    known = {name_of(each) for each in MODULES}
    used = {room(module) for module in imports_of(path) if module in known}
    assert used - MAY_IMPORT[own] - {own} - ({"__init__"} if own == "cli" else set()) == set()


@pytest.mark.parametrize("folder", ["formats", "dialects", "migrate/rules"])
def test_no_newcomer_imports_another(folder: str) -> None:
    """A format knows no other format, and so on; files with an underscore are shared parts."""
    paths = [path for path in (PACKAGE / folder).glob("*.py") if path.name != "__init__.py"]
    public = {name_of(path) for path in paths if not path.name.startswith("_")}
    found = {(name_of(path), used) for path in paths for used in imports_of(path) & public - {name_of(path)}}
    assert found == set()


@pytest.mark.parametrize("path", [p for p in MODULES if room(name_of(p)) in ("core", "migrate", "errors")], ids=ids)
def test_core_and_migrate_import_no_torch(path: Path) -> None:
    roots = {module.partition(".")[0] for module in imports_of(path)}
    assert not roots & {"torch", "deepspeed", "accelerate", "transformers", "safetensors", "numpy"}


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_heavy_packages_are_imported_late(path: Path) -> None:
    top = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom) and not node.level}
    heavy = {"deepspeed", "accelerate", "transformers", "zstandard"} | ({"torch"} if "cli" in path.parts else set())
    assert not {name.partition(".")[0] for name in names} & heavy


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_every_module_opens_with_a_sentence(path: Path) -> None:
    page = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert page, "a module says what it is"
    paragraph = " ".join(page.split("\n\n")[0].split())
    assert len(paragraph) > 15 and paragraph[-1] in ".:)" and not paragraph.startswith(("This module", "Module"))


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_no_file_is_two_things(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LIMIT


def test_files_are_short() -> None:
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES)
    assert lengths[len(lengths) // 2] < 120


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_names_say_something(path: Path) -> None:
    assert not FORBIDDEN.search(path.stem) and not FORBIDDEN.search(path.parent.name)


@pytest.mark.parametrize(
    ("folder", "mirror"), [("formats", "formats"), ("dialects", "dialects"), ("migrate/rules", "migrate")]
)
def test_every_newcomer_has_a_test(folder: str, mirror: str) -> None:
    """A file of its own, or (for rules) a before/after pair that the generic test trains."""
    tests = {path.stem for path in (ROOT / "tests" / mirror).rglob("test_*.py")}
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / mirror).rglob("*.py"))
    pairs = {path.name for path in (ROOT / "fixtures" / "scripts").iterdir() if (path / "before.py").exists()}
    names = [path.stem for path in (PACKAGE / folder).glob("[!_]*.py")]
    assert names
    missing = [
        name for name in names
        if not any(test.startswith(f"test_{name}") for test in tests) and name not in pairs
        and f'"{name}"' not in text and f'"{name.replace("_", "-")}"' not in text
    ]  # fmt: skip
    assert missing == []


def test_every_strategy_trains_a_fixture_or_is_tested() -> None:
    from fixtures.catalog import CATALOG

    trained = {fixture.strategy.partition("-")[0] for fixture in CATALOG}
    names = {path.stem for path in (PACKAGE / "verify/strategies").glob("[!_]*.py")}
    assert {name for name in names if not any(each.startswith(name) for each in trained)} == set()


def test_the_test_sees_what_it_forbids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an import in the wrong direction, hidden in a function, is found."""
    package = tmp_path / "ckptkit" / "core"
    package.mkdir(parents=True)
    path = package / "box.py"
    path.write_text("def f():\n    from ..formats import full\n    import torch.nn\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert imports_of(path) == {"ckptkit.formats", "ckptkit.formats.full", "torch.nn"}
