"""Time of `ckptkit migrate` on a repository of 1,000 files, beside compileall and a plain LibCST parse of it.

    python -m tests.benchmarks.migrate [--files 1000] [--lines 200]

Each tool runs in a process of its own, start-up included; the seconds are those of the CPU. Three repositories are
generated: one in which 30 files in a thousand train with FSDP1 and the others import torch, one in which all import
torch and none names an API, and one large file in which the APIs are used all over. One module in ten trains, the
others hold layers. The code is made of the fixtures of this repository.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "fixtures" / "scripts"
_PARSE = """
import sys
from pathlib import Path
import libcst
for path in sorted(Path(sys.argv[1]).rglob("*.py")):
    libcst.parse_module(path.read_bytes())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=200)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ckptkit-bench-"))
    makers: dict[str, Callable[[Path], None]] = {
        "30 of 1,000 train with FSDP1": lambda folder: repository(folder, options.files, options.lines, 33),
        "all import torch, none FSDP": lambda folder: repository(folder, options.files, options.lines, 0),
        "one file of 3,000 lines": lambda folder: large(folder, 3000),
    }
    try:
        print(
            f"{'':30} {'files':>6} {'compileall':>11} {'libcst':>8} {'migrate':>8} {'x compileall':>13} {'x libcst':>9}"
        )
        for name, make in makers.items():
            make(root / name)
            row(name, root / name)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def row(name: str, folder: Path) -> None:
    """Measure the tools on a folder and print one line."""
    count = sum(1 for _ in folder.rglob("*.py"))
    compiled = measured(sys.executable, "-m", "compileall", "-q", "-f", str(folder))
    parsed = measured(sys.executable, "-c", _PARSE, str(folder))
    migrated = measured(sys.executable, "-m", "ckptkit", "migrate", str(folder), codes=(0, 1))
    ratios = f"{migrated / compiled:13.2f} {migrated / parsed:9.2f}"
    print(f"{name:30} {count:6} {compiled:10.2f}s {parsed:7.2f}s {migrated:7.2f}s {ratios}", flush=True)


def measured(*command: str, codes: tuple[int, ...] = (0,)) -> float:
    """CPU seconds of one command. Raises SystemExit with its stderr where it fails."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    if done.returncode not in codes:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{done.stderr[-2000:]}")
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def repository(folder: Path, files: int, lines: int, every: int) -> None:
    """Packages of 25 modules that import each other; each `every`-th module is one of the FSDP1 fixtures."""
    random.seed(0)
    scripts = sorted(path for path in SCRIPTS.rglob("before.py") if "FullyShardedDataParallel" in path.read_text())
    for number in range(files):
        package = folder / f"package{number // 25}"
        package.mkdir(parents=True, exist_ok=True)
        path = package / f"module{number}.py"
        if every and number % every == every - 1:
            path.write_text(scripts[number // every % len(scripts)].read_text())
        else:
            path.write_text(module(number, lines))


FIT = """
def fit(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
"""


def module(number: int, lines: int) -> str:
    """A module of layers, a loop and a little arithmetic that imports its neighbours."""
    near = f"from .module{number - 1} import Layer{number - 1}_0\n" if number % 25 else ""
    text = [f"import torch\nfrom torch import nn\n{near}\n"]
    for layer in range(max(1, lines // 17)):
        text.append(
            f'''
class Layer{number}_{layer}(nn.Module):
    """Layer {layer} of module {number}."""

    def __init__(self, width, depth=2, *, rate=0.1):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.rate = rate

    def forward(self, x, mask=None):
        for index, part in enumerate(self.parts):
            y = part(x) if mask is None else part(x) * mask
            x = x + torch.nn.functional.dropout(y, self.rate, training=self.training)
        return self.norm(x)

'''
        )
    if number % 10 == 0:
        text.append(FIT)
    return "\n".join(text)


def large(folder: Path, lines: int) -> None:
    """One file of functions that each build, train, clip, save and load a model."""
    folder.mkdir(parents=True)
    head = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n" + (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType\n"
        "from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy\n"
        "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n\n\nclass Block(nn.Module):\n    pass\n\n"
    )
    part = """
def run{n}(args, batches, net, rank):
    mp = MixedPrecision(param_dtype=torch.bfloat16) if args.amp else None
    policy = ModuleWrapPolicy({{Block}})
    model = FSDP(net, auto_wrap_policy=policy, mixed_precision=mp, sync_module_states=True, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    for step, (x, y) in enumerate(batches):
        loss = (model(x) - y).square().mean()
        loss.backward()
        norm = model.clip_grad_norm_(args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and step % 10 == 0:
            print(f"step {{step}} loss {{loss.item():.4f}} norm {{norm:.3f}}")
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, f"model{n}.pt")
    return model

"""
    (folder / "train.py").write_text(head + "".join(part.format(n=n) for n in range(lines // 21)))


if __name__ == "__main__":
    main()
