"""The error tree: codes, words, and that every error raised anywhere says what, why and what to do next."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ckptkit import errors
from ckptkit.errors import CkptkitError, Exit, MissingPackageError, SourceError

ROOT = Path(__file__).resolve().parent.parent
CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, CkptkitError)]
SOURCES = sorted(path for folder in ("ckptkit", "cli") for path in (ROOT / folder).rglob("*.py")
                 if "verify" not in path.parts and "migrate" not in path.parts)  # fmt: skip


def test_the_exit_codes_are_those_that_are_documented() -> None:
    assert {code.name: int(code) for code in Exit} == {
        "OK": 0, "FINDINGS": 1, "USAGE": 2, "SOURCE": 3, "EXISTS": 4, "LOSS": 5, "CHECK": 6, "BUG": 101,
        "INTERRUPTED": 130,
    }  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_code_of_its_own_kind(cls: type[CkptkitError]) -> None:
    expected = {
        "UsageError": 2, "MissingPackageError": 2, "SourceError": 3, "UnsafePickleError": 3, "AmbiguousError": 3,
        "TargetError": 4, "ExistsError": 4, "LossError": 5, "CheckError": 6, "CkptkitError": 101,
    }  # fmt: skip
    assert cls.code == expected[cls.__name__] and cls.__doc__


def test_an_error_says_all_of_it_in_order() -> None:
    error = SourceError("what", why="because", hint="do this", faults=["one", "two"])
    assert str(error) == "what\n  - one\n  - two\nwhy: because\nhint: do this"
    assert (error.what, error.faults) == ("what", ("one", "two")) and str(SourceError("what")) == "what"


def test_a_missing_package_names_its_extra() -> None:
    error = MissingPackageError("zstandard", needed_for="this", extra="zstd")
    assert error.package == "zstandard" and "[zstd]" in error.hint and error.why


def raised(path: Path) -> list[tuple[int, str, set[str]]]:
    """Every construction of an error of the tree: line, class, keywords."""
    names = {each.__name__ for each in CLASSES} - {"MissingPackageError"}
    return [
        (node.lineno, node.func.id, {keyword.arg or "**" for keyword in node.keywords})
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_error_says_why_and_what_to_do(path: Path) -> None:
    short = [f"line {line}: {name} without {', '.join(sorted({'why', 'hint'} - said))}"
             for line, name, said in raised(path) if not {"why", "hint"} <= said and "**" not in said]  # fmt: skip
    assert short == []


def test_the_test_above_reads_real_errors() -> None:
    assert sum(len(raised(path)) for path in SOURCES) > 80
