"""A fork server that runs training scripts on several gloo ranks: torch is imported once, each run costs about a
second.

`python harness.py` is the server: it reads one JSON request a line and answers one JSON line. `Runner` is its client.
A run is judged by what the script recorded, not by how its processes ended: gloo aborts some of them at exit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "fixtures" / "scripts"


class RunError(AssertionError):
    """A script recorded nothing; the message holds the end of what its ranks printed."""


@dataclass(slots=True)
class Runner:
    """Client of one fork server. Use as a context manager."""

    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Runner:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:  # still importing torch: nothing was asked of it
            self.process.kill()
            self.process.wait()

    def run(
        self,
        script: Path,
        *,
        cwd: Path | None = None,
        world: int = 2,
        timeout: float = 60,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """What a script recorded when run on `world` ranks. Raises RunError when it recorded nothing, twice."""
        for attempt in (1, 2):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
                out = Path(scratch) / "record.json"
                request = {
                    "script": str(script),
                    "cwd": str(cwd or scratch),
                    "world": world,
                    "timeout": timeout,
                    "record": str(out),
                    "args": list(args),
                    "env": env or {},
                    "logs": scratch,
                }
                assert self.process.stdin is not None and self.process.stdout is not None
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
                answer = json.loads(self.process.stdout.readline())
                if out.exists():
                    return dict(json.loads(out.read_text()))
                if attempt == 2 or not answer["aborted"]:
                    tails = [Path(log).read_text()[-3000:] for log in answer["logs"]]
                    raise RunError(f"{script} recorded nothing ({answer['codes']}):\n" + "\n---\n".join(tails))
        raise AssertionError("unreachable")


def _serve() -> None:
    import torch
    import torch.distributed
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.nn.parallel

    from ckptkit.verify.deepspeed_ops import BUILDERS, build_ops, load_built_ops

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        text = Path(request["script"]).read_text()
        if "from transformers" in text:
            import transformers.models.llama.modeling_llama  # noqa: F401 - once for all runs: it costs seconds
        if "import deepspeed" in text:
            # Once for all runs: the import costs seconds, and an op's compile a minute in which no run may be killed.
            build_ops(*BUILDERS)
            load_built_ops()
        port = _free_port()
        children, logs = [], []
        for rank in range(request["world"]):
            log = os.path.join(request["logs"], f"rank{rank}.log")
            logs.append(log)
            pid = os.fork()
            if pid == 0:
                _child(request, rank, port, log)
            children.append(pid)
        codes = _wait(children, request["timeout"])
        aborted = any(code in (-signal.SIGABRT, -signal.SIGSEGV) for code in codes)
        print(json.dumps({"codes": codes, "logs": logs, "aborted": aborted}), flush=True)


def _child(request: dict[str, Any], rank: int, port: int, log: str) -> None:
    import runpy
    import traceback

    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(0)
    os.chdir(request["cwd"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request["world"]),
        LOCAL_WORLD_SIZE=str(request["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CKPTKIT_RECORD=request["record"],
        **request["env"],
    )
    sys.argv = [request["script"], *request["args"]]
    sys.path.insert(0, str(Path(request["script"]).parent))
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(children: list[int], timeout: float) -> list[int]:
    """Exit codes (negative: signal) of all children; once one failed the others get five more seconds."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            for child in children:
                if child not in codes:
                    os.killpg(child, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.01)
    return [codes[child] for child in children]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    _serve()
