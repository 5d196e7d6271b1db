"""Memory and time of conversions of a large checkpoint, beside `cp -r` and the frameworks' own tools, in one run.

    python -m tests.benchmarks.convert [--gigabytes 4] [--folder DIR]

Each tool runs in a process of its own; its peak memory is what the kernel says of that process (ru_maxrss, which counts
Python, torch and mapped files too). The source is written by torch.distributed.checkpoint, the ZeRO source by ckptkit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_MAKE = """
import sys, torch
import torch.distributed.checkpoint as dcp
count, rows = int(sys.argv[2]), 2048
def big(seed): return torch.randn(rows, 8192, generator=torch.Generator().manual_seed(seed))
model = {f"layers.{i}.weight": big(i) for i in range(count)}
state = {n: {"exp_avg": big(7), "exp_avg_sq": big(9).abs(), "step": torch.tensor(3.0)} for n in model}
groups = [{"params": list(model), "lr": 1e-3, "weight_decay": 0.1}]
dcp.save({"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": 3}, checkpoint_id=sys.argv[1])
"""
_TO_TORCH = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""
_TO_FP32 = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2])
"""
_MEASURE = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"seconds": time.perf_counter() - begin, "peak": usage.ru_maxrss * 1024, "code": done.returncode,
                  "stderr": done.stderr.decode()[-2000:]}))
"""


def measured(*command: str) -> dict[str, float]:
    """Wall seconds and peak bytes of one command. Raises SystemExit with its stderr where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    out = subprocess.run(
        [sys.executable, "-c", _MEASURE, *command], capture_output=True, text=True, env=environment, check=True
    )
    found = json.loads(out.stdout)
    if found["code"]:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{found['stderr']}")
    return found


def warm(folder: Path) -> None:
    """Bring the files into the page cache, so that every tool starts alike."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ckptkit-bench-", dir=options.folder))
    try:
        run(root, options.gigabytes)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run(root: Path, gigabytes: float) -> None:
    source, zero = root / "dcp", root / "zero"
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * 2048 * 8192)))
    measured(sys.executable, "-c", _MAKE, str(source), str(layers))
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    print(f"source: {size / 1e9:.2f} GB, {layers} layers, written by torch.distributed.checkpoint")
    ckptkit = [sys.executable, "-m", "ckptkit", "convert", str(source)]
    unchecked = ["--check", "none"]
    rows: list[tuple[str, dict[str, float]]] = []

    def row(name: str, *command: str, drop: str) -> None:
        warm(source)
        begin = time.perf_counter()
        rows.append((name, measured(*command)))
        print(f"  {name}: done in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        target = root / drop
        if target != zero:
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    row("cp -r", "cp", "-r", str(source), str(root / "copy"), drop="copy")
    row(
        "ckptkit dcp -> dcp, 8 ranks",
        *ckptkit,
        str(root / "d"),
        "--to",
        "dcp",
        "--world-size",
        "8",
        *unchecked,
        drop="d",
    )
    row("  the same, read back in full", *ckptkit, str(root / "d"), "--to", "dcp", "--world-size", "8", drop="d")
    row("ckptkit dcp -> full", *ckptkit, str(root / "f"), "--to", "full", *unchecked, drop="f")
    row("dcp_to_torch_save", sys.executable, "-c", _TO_TORCH, str(source), str(root / "t"), drop="t")
    row("ckptkit dcp -> zero2, 4 ranks", *ckptkit, str(zero), "--to", "zero2", "--world-size", "4", *unchecked,
        "--allow-drop", drop="zero")  # fmt: skip
    from_zero = [sys.executable, "-m", "ckptkit", "convert", str(zero)]
    row(
        "ckptkit zero2 -> full, weights",
        *from_zero,
        str(root / "w"),
        "--to",
        "full",
        "--weights-only",
        *unchecked,
        drop="w",
    )
    row("zero_to_fp32", sys.executable, "-c", _TO_FP32, str(zero), str(root / "z"), drop="z")
    copy = rows[0][1]["seconds"]
    print(f"{'':34} {'seconds':>8} {'x cp':>6} {'peak MB':>8}")
    for name, found in rows:
        print(f"{name:34} {found['seconds']:8.1f} {found['seconds'] / copy:6.2f} {found['peak'] / 1e6:8.0f}")


if __name__ == "__main__":
    main()
