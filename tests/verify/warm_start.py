"""Starts the processes of a script from a fork server that has imported torch already: one second in place of ten.

Only the start is another: what is watched, how scripts are stopped and what is read is the code of a real launch, and
test_script.py launches really. Of the imports that a script makes, only those of torch and DeepSpeed come earlier.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from ckptkit.verify import script_launch

PRELOADED = ["ckptkit.verify.preload_torch", "ckptkit.verify.preload_deepspeed"]


@contextmanager
def warm_start() -> Iterator[None]:
    """Within, `run_script` forks what it would start."""
    real = script_launch.subprocess
    script_launch.subprocess = SimpleNamespace(Popen=Forked, STDOUT=subprocess.STDOUT)
    try:
        yield
    finally:
        script_launch.subprocess = real


class Forked:
    """What `run_script` needs of a Popen."""

    def __init__(self, command: list[str], env: dict[str, str], stdout: IO[bytes], **others: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.process = context.Process(target=run_as_script, args=(command[1:], env, stdout.name, os.getcwd()))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join(30)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        return self.process.exitcode


def run_as_script(argv: list[str], environment: dict[str, str], output: str, folder: str) -> None:
    """In the child: becomes what `python argv...` would be, watched as the generated sitecustomize has it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    stream = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.argv = argv
    searched = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [str(Path(argv[0]).parent), *searched]
    from ckptkit.verify import recorder, recorder_deepspeed

    recorder.start()
    if "deepspeed" in sys.modules:
        recorder_deepspeed.attach()
    sys.modules["__main__"].__dict__.pop("__spec__", None)
    runpy.run_path(argv[0], run_name="__main__")
