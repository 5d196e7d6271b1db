"""Functions that all ranks but one leave early: what gathers stands above, and what cannot is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Runner

HEAD = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def is_main():
    return dist.get_rank() == 0

def main(net, args):
    net = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        save(net, optimizer, args, epoch)

"""
LEAVES = {
    "a function": "if not is_main():\n        return",
    "unequal": "if dist.get_rank() != 0: return",
    "greater": "if dist.get_rank() > 0:\n        return None",
    "a word before": "if not is_main():\n        print('nothing to save')\n        return",
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
def test_what_gathers_stands_above(leave: str, migrated: Callable) -> None:
    found = migrated(f"""{HEAD}
def save(net, optimizer, args, epoch):
    {leave}
    state = {{"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}}
    torch.save(state, "a.pt")
""")
    body = found.text[found.text.index("def save(") :]
    assert "manual" not in found.grades, found.report.findings
    at = [body.index(part) for part in ("get_model_state_dict(", "get_optimizer_state_dict(", leave, "state = {")]
    assert at == sorted(at)
    assert '"model": model_state, "optimizer": optimizer_state' in body and "cpu_offload=True" in body


def test_what_else_is_asked_goes_along(migrated: Callable) -> None:
    """Nothing is gathered on steps that save nothing, nor for what is not there."""
    text = migrated(f"""{HEAD}
def save(net, optimizer, args, epoch):
    if epoch % 2 or dist.get_rank() != 0:
        return
    state = {{"model": net.state_dict()}}
    if args.resumable:
        state["optimizer"] = optimizer.state_dict()
    torch.save(state, "a.pt")
""").text
    body = " ".join(text[text.index("def save(") :].split())
    assert "model_state = None if not (epoch % 2): model_state = get_model_state_dict(" in body
    assert "optimizer_state = None if not (epoch % 2) and args.resumable: optimizer_state = get_optimizer" in body


@pytest.mark.parametrize("lines", ["for part in args.parts:\n        torch.save(net.state_dict(), part)",
                                   "net = args.net or net\n    torch.save(net.state_dict(), 'a.pt')"])  # fmt: skip
def test_what_cannot_stand_above_is_said(lines: str, migrated: Callable) -> None:
    found = migrated(
        f"{HEAD}\ndef save(net, optimizer, args, epoch):\n    if not is_main():\n        return\n    {lines}\n"
    )
    assert "TODO(ckptkit): all ranks must run this" in found.text and "manual" in found.grades


def test_a_model_that_runs_on_one_rank_is_said(migrated: Callable) -> None:
    found = migrated(f"""{HEAD}
def save(net, optimizer, args, epoch):
    if not is_main():
        return
    print(net(args.batch).mean())
""")
    assert "manual" in found.grades


def test_a_model_that_has_no_such_method(migrated: Callable) -> None:
    """One function wraps several models, and one of them alone has a method that runs its layers."""
    text = migrated("""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class G(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.layer(x)

class D(G):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 1)
    def features(self, x):
        return self.layer(x)

def wrap(model):
    return DDP(model)

g, d = wrap(G()), wrap(D())
print(d.module.features(g(torch.ones(1, 2))))
""").text
    assert 'if hasattr(model, "features"):\n        register_fsdp_forward_method(model, "features")' in text


@pytest.mark.slow
def test_it_saves_what_ddp_saved(migrated: Callable, runner: Runner, tmp_path: Path) -> None:
    import torch

    program = f"""
from record import record
{HEAD.replace("def main(net, args):", "def train(net, args):")}
def save(net, optimizer, args, epoch):
    if epoch % 2 or not is_main():
        return
    state = {{"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}}
    torch.save(state, f"{{epoch}}.pt")

dist.init_process_group("gloo")
torch.manual_seed(0)
train(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), None)
record([0.0])
"""
    (tmp_path / "before.py").write_text(program)
    (tmp_path / "after.py").write_text(migrated(program).text)
    for side in ("before", "after"):
        (tmp_path / side).mkdir()
        runner.run(tmp_path / f"{side}.py", cwd=tmp_path / side)
    for epoch in (0, 2):
        one, other = (torch.load(tmp_path / side / f"{epoch}.pt") for side in ("before", "after"))
        assert all(torch.equal(other["model"][name], value) for name, value in one["model"].items())
        assert len(other["model"]) == 4 and other["epoch"] == epoch
    assert not (tmp_path / "after" / "1.pt").exists()
