"""DeepSpeed's ops are loaded before a pool forks, and a lock that a killed compile left is said, not waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import CkptkitError
from ckptkit.verify.deepspeed_ops import BUILDERS, COMM, build_ops
from ckptkit.verify.pool import Pool

pytestmark = pytest.mark.slow


def test_a_rank_finds_every_op_loaded_and_so_takes_no_lock(pool: Pool) -> None:
    assert pool.run("tests.verify.pool_jobs:loaded_ops", world_size=1) == [sorted(BUILDERS)]


def test_a_lock_that_nobody_holds_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / COMM / "lock"
    lock.parent.mkdir()
    lock.touch()
    with pytest.raises(CkptkitError, match="waits for") as caught:
        build_ops(COMM, abandoned_after=0.5)
    assert str(lock) in caught.value.hint
    assert lock.exists()  # it may be another's after all: a person decides


def test_a_compile_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CkptkitError, match="did not compile") as caught:
        build_ops(COMM)
    assert caught.value.why and "g++" in caught.value.hint
    assert not (tmp_path / COMM / "lock").exists()
