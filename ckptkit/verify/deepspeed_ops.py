"""DeepSpeed's C++ ops, compiled before anything is timed and loaded before anything is forked.

DeepSpeed compiles an op where it is first used, and torch guards the folder with a file named `lock` that only the
process which made it removes (torch 2.13, utils/file_baton.py). The first use in every process holds it, for a second
at least, while ninja looks whether the op is up to date. A rank that is killed in between, by a time limit or by a
failure of its peer, leaves the lock behind, and from then on every DeepSpeed program of that user waits for it without
a word.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from ..errors import CkptkitError

COMM = "deepspeed_shm_comm"  # what `deepspeed.init_distributed` needs on CPU
BUILDERS = {COMM: "ShareMemCommBuilder", "fused_adam": "FusedAdamBuilder", "cpu_adam": "CPUAdamBuilder"}
ABANDONED_SECONDS = 600.0  # one file of these ops compiles in 20 to 120 s on two busy cores


def build_ops(*names: str, abandoned_after: float = ABANDONED_SECONDS) -> None:
    """Compiles the ops for CPU that are not compiled yet, each in a process of its own that no time limit ends.

    Does nothing without DeepSpeed. Raises CkptkitError for a lock that a killed compile left, and for a failed compile.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    missing = [name for name in names if not _built(name)]
    if missing:
        print(f"compiling DeepSpeed's {', '.join(missing)} (first use; a minute or two)", file=sys.stderr, flush=True)
    # A session of their own: Ctrl-C ends the caller, not a compile half way.
    compiles = {
        name: subprocess.Popen(
            [sys.executable, "-m", "ckptkit.verify.deepspeed_ops", name],
            env={**os.environ, "DS_ACCELERATOR": "cpu"}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for name in missing
    }  # fmt: skip
    for name, process in compiles.items():
        errors = _errors_of(process, name, abandoned_after)
        if process.returncode:
            raise CkptkitError(
                f"DeepSpeed's op {name} did not compile",
                why=(errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1],
                hint="DeepSpeed's ds_report tells what is missing; it needs g++ and ninja",
            )


def _errors_of(process: subprocess.Popen[str], name: str, abandoned_after: float) -> str:
    """What a compile wrote to stderr, when it has ended."""
    while True:
        try:
            return process.communicate(timeout=2.0)[1]
        except subprocess.TimeoutExpired:
            if _abandoned(name, abandoned_after):
                process.kill()
                process.communicate()
                raise _lock_left(name) from None


def load_built_ops() -> None:
    """Loads the ops that are compiled, for a process that forks: its children find them loaded and take no lock."""
    from deepspeed.accelerator import get_accelerator

    for name, builder in BUILDERS.items():
        if _built(name):
            get_accelerator().create_op_builder(builder).load(verbose=False)


def _folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def _built(name: str) -> bool:
    folder = _folder(name)
    return (folder / f"{name}.so").exists() and not (folder / "lock").exists()


def _abandoned(name: str, after: float) -> bool:
    """A lock in a folder where nothing was written for so many seconds."""
    folder = _folder(name)
    if not (folder / "lock").exists():
        return False
    try:
        newest = max(path.stat().st_mtime for path in folder.iterdir())
    except (FileNotFoundError, ValueError):
        return False  # the compile is going on
    return time.time() - newest > after


def _lock_left(name: str) -> CkptkitError:
    lock = _folder(name) / "lock"
    return CkptkitError(
        f"DeepSpeed's op {name} waits for {lock}",
        why=f"nothing has been written beside it for {ABANDONED_SECONDS / 60:g} minutes: a compile was killed there",
        hint=f"if no other process compiles it, rm {lock}",
    )


def main(name: str) -> None:
    """The process of its own."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(BUILDERS[name]).load(verbose=False)


if __name__ == "__main__":
    main(sys.argv[1])
