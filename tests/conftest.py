"""Fixtures of the whole test suite: one pool of ranks, and real checkpoints that are built when first asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# Times are not what the property tests are about: the machines that run them are shared.
settings.register_profile("ckptkit", deadline=None, database=None, max_examples=60)
settings.load_profile("ckptkit")

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a failure when it happens: a run that is stopped never comes to its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)", flush=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[object]:
    """Up to four ranks on CPU; `pool.run(function, world_size=2, ...)` answers what each rank returned."""
    from ckptkit.verify.deepspeed_ops import BUILDERS, build_ops
    from ckptkit.verify.pool import Pool
    from fixtures.make import RANKS

    build_ops(*BUILDERS)
    with Pool(RANKS) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def fixture_dir(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """`fixture_dir("zero2")`: a folder with ckpt..., truth.json, truth.pt and continue.json, see fixtures/catalog.py.

    Read it, never write into it: it is kept for all tests and later runs, under a hash of all that it depends on.
    """
    from filelock import FileLock

    from fixtures.fingerprint import fingerprint
    from fixtures.make import find, make

    @cache
    def build(name: str) -> Path:
        fixture = find(name)
        parent = ROOT / ".cache" / "fixtures" / fingerprint(fixture)
        folder = parent / name
        if not folder.exists():
            parent.mkdir(parents=True, exist_ok=True)
            with FileLock(parent / ".lock"):
                if not folder.exists():
                    make(fixture, parent, request.getfixturevalue("pool"))
        return folder

    return build
