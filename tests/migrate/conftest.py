"""Shared by the tests of migrate: one fork server for a session, and a way to migrate a snippet."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptkit import migrate
from ckptkit.migrate import Changed, Report

sys.path.insert(0, str(Path(__file__).parent))
from harness import Runner


@dataclass(frozen=True, slots=True)
class Migrated:
    """The text of one file after a run, and the run's report."""

    text: str
    report: Report

    @property
    def grades(self) -> list[str]:
        return [finding.grade.value for finding in self.report.findings]


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    with Runner() as one:
        yield one


@pytest.fixture
def migrated(tmp_path: Path) -> Callable[..., Migrated]:
    """Migrate a snippet (`others`: further files of the run by name) and check that a second run changes nothing."""

    def run(code: str, *, ignore: tuple[str, ...] = (), others: dict[str, str] | None = None) -> Migrated:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        for name, text in {"train.py": code, **(others or {})}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(textwrap.dedent(text).lstrip("\n").encode())
        report = migrate.run([folder], ignore=ignore, write=True)
        assert not [f for f in report.failed if f.bug], report.failed
        again = migrate.run([folder], ignore=ignore)
        assert not again.changed, "".join(c.diff() for c in again.changed)
        return Migrated((folder / "train.py").read_bytes().decode(), report)

    return run


@pytest.fixture
def untouched(migrated: Callable[..., Migrated]) -> Callable[..., None]:
    """Assert that a snippet is left as it is, with nothing to report."""

    def check(code: str, **others: str) -> None:
        found = migrated(code, others=others or None)
        assert found.text == textwrap.dedent(code).lstrip("\n")
        assert not found.report.findings and not isinstance(found.report.outcomes[:1], Changed)

    return check
