"""The pool: fresh groups of any size, errors with rank and traceback, ranks that die or hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptkit.errors import MissingPackageError, UsageError
from ckptkit.verify.pool import JobError, Pool

from . import pool_jobs as jobs


def attempts(diary: Path) -> int:
    return (diary / "0").stat().st_size


def test_two_world_sizes_in_a_row(pool: Pool) -> None:
    for size, expected in ((2, 5.0), (4, 14.0), (3, 9.0), (1, 2.0)):
        answers = pool.run(jobs.total, world_size=size, value=2.0)
        assert answers == [(expected, str(rank), str(size)) for rank in range(size)]


def test_a_function_by_name(pool: Pool) -> None:
    assert pool.run(f"{jobs.__name__}:total", world_size=2, value=0.0)[0][0] == 1.0


def test_no_job_sees_what_another_left(pool: Pool) -> None:
    assert [pool.run(jobs.leave_a_mark, world_size=1) for _ in range(2)] == [["clean"], ["clean"]]


def test_ranks_are_processes_of_their_own(pool: Pool) -> None:
    first, second = (pool.run(jobs.process, world_size=2) for _ in range(2))
    assert len({*first, *second}) == 4


def test_deepspeed_takes_another_world_size_each_time(pool: Pool) -> None:
    pytest.importorskip("deepspeed")
    assert [pool.run(jobs.deepspeed_world, world_size=size) for size in (2, 3)] == [[2, 2], [3, 3, 3]]


def test_an_error_names_the_rank_and_is_not_retried(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        pool.run(jobs.fail, world_size=2, rank=1, diary=str(tmp_path))
    assert "KeyError: 'the reason'" in caught.value.tracebacks[1]
    assert "pool_jobs.py" in caught.value.tracebacks[1]
    assert "rank 1: KeyError: 'the reason'" in caught.value.faults
    assert attempts(tmp_path) == 1


def test_an_error_of_ours_arrives_as_itself(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        pool.run(jobs.usage, world_size=2, diary=str(tmp_path))
    assert (caught.value.what, caught.value.hint, caught.value.faults) == ("wrong use", "use it rightly", ("a", "b"))
    with pytest.raises(MissingPackageError, match="nonesuch"):
        pool.run(jobs.missing, world_size=1)


def test_a_dead_rank_is_replaced_and_the_job_tried_again(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(jobs.die, world_size=2, diary=str(tmp_path), times=1) == [1.0, 1.0]
    assert attempts(tmp_path) == 2


def test_a_rank_that_always_dies_is_reported_with_its_last_words(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        pool.run(jobs.die, world_size=2, diary=str(tmp_path), times=9)
    assert "exit code 9" in caught.value.lost[1]
    assert "last words" in caught.value.lost[1]
    assert attempts(tmp_path) == 2
    assert pool.run(jobs.total, world_size=2, value=0.0)[0][0] == 1.0


def test_a_hanging_rank_fails_the_job_in_time() -> None:
    begin = time.monotonic()
    with Pool(2, retries=0) as ranks, pytest.raises(JobError) as caught:
        ranks.run(jobs.hang, world_size=2, timeout=5.0, rank=1)
    assert list(caught.value.lost) == [1]
    assert "within" in caught.value.lost[1]
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("size", [0, 5])
def test_a_world_size_that_the_pool_has_not(pool: Pool, size: int) -> None:
    with pytest.raises(ValueError, match="world size"):
        pool.run(jobs.total, world_size=size, value=0.0)


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "print('started', flush=True)\n"
        "from ckptkit.verify.pool import Pool\n"
        "with Pool(2) as ranks:\n"
        f"    print(len(ranks.run('{jobs.__name__}:process', world_size=2)), 'ranks')\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["started", "2 ranks"], done.stderr
