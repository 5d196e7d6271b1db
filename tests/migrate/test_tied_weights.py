"""Tied weights: guarded where a group would part them, left alone elsewhere, and trained as by DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SCRIPTS, RunError, Runner

CODE = """
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy


class Block(nn.Module):
    pass


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.block = Block()
        self.head = Head()
        TIE


model = FSDP(Net(), auto_wrap_policy=POLICY)
"""
TIE = "self.head.proj.weight = self.embed.weight"
APART = ["{Block, nn.Embedding}", "{Head, Block}", "[nn.Linear]", "{Block, Head, nn.Embedding}"]


@pytest.mark.parametrize("policy", [*(f"ModuleWrapPolicy({one})" for one in APART), "always_wrap_policy"])
def test_a_group_that_would_part_them_is_guarded(migrated: Callable, policy: str) -> None:
    found = migrated(CODE.replace("TIE", TIE).replace("POLICY", policy))
    assert "apart = tied_apart(model)" in found.text and "module not in apart" in found.text
    assert "numerics" in found.grades


@pytest.mark.parametrize(
    ("tie", "policy"),
    [
        (TIE, "ModuleWrapPolicy({Block})"),
        (TIE, "ModuleWrapPolicy({Block, Net})"),
        ("self.head.proj.weight.data = self.embed.weight.data", "ModuleWrapPolicy({Head})"),
        ("self.scale = self.embed.embedding_dim", "ModuleWrapPolicy({Head})"),
        ("pass", "ModuleWrapPolicy({Block, Head, nn.Embedding})"),
    ],
)
def test_others_are_left_alone(migrated: Callable, tie: str, policy: str) -> None:
    assert "apart" not in migrated(CODE.replace("TIE", tie).replace("POLICY", policy)).text


@pytest.mark.slow
def test_tied_weights_train_as_by_ddp(runner: Runner, tmp_path: Path) -> None:
    before = (SCRIPTS / "tied_weights" / "before.py").read_text()
    after = SCRIPTS / "tied_weights" / "after.py"
    lines = [
        "model = nn.parallel.DistributedDataParallel(Tied().to(device))" if "FSDP(Tied()" in line else line
        for line in before.splitlines()
    ]
    script = tmp_path / "ddp.py"
    script.write_text("\n".join(line if "DistributedData" not in line else f"    {line}" for line in lines))
    losses = runner.run(after, cwd=tmp_path)["losses"]
    assert losses == runner.run(script, cwd=tmp_path)["losses"]
    parted = runner.run(SCRIPTS / "tied_weights" / "before.py", cwd=tmp_path)["losses"]
    assert losses[0] == parted[0] and max(abs(a - b) for a, b in zip(losses, parted, strict=True)) > 1e-3
    script.write_text(after.read_text().replace("module not in apart and ", ""))
    with pytest.raises(RunError, match="is shared with a parameter already managed"):
        runner.run(script, cwd=tmp_path)
