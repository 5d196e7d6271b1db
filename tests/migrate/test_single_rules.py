"""Rules without a pair of their own: what each writes, says and grades, on the smallest program that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

HEAD = """
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""
MODEL = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


"""
DEEPSPEED = "import deepspeed\nimport torch\nfrom torch import nn\n"
CONFIG = '{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}'

CASES: dict[str, tuple[str, list[str], str]] = {
    "ddp_groups": (
        f"{HEAD}{MODEL}model = DDP(Net())\n",
        ["isinstance(module, Block)", "fully_shard(module", "fully_shard(model"],
        "performance exact",
    ),
    "ddp_mixed_precision": (
        f"{HEAD}from torch.nn.parallel.distributed import _MixedPrecision\n"
        "model = nn.Linear(4, 4)\n"
        "model = DDP(model, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))\n",
        ["MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"],
        "numerics",
    ),
    "deepspeed_broadcast": (
        f"{DEEPSPEED}config = {CONFIG}}}\nmodel = nn.Linear(4, 4)\n"
        "engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config,"
        " model_parameters=model.parameters())\n",
        ["dist.broadcast(tensor.detach(), src=0)"],
        "exact",
    ),
    "deepspeed_partitioned": (
        f"{DEEPSPEED}with deepspeed.zero.Init():\n    model = nn.Linear(4, 4)\n",
        ["\nmodel = nn.Linear(4, 4)"],
        "exact performance",
    ),
    "deepspeed_unsupported": (
        f'{DEEPSPEED}config = {CONFIG}, "zero_optimization": {{"stage": 3, "offload_param": {{"device": "nvme"}}}}}}\n'
        "model = nn.Linear(4, 4)\n"
        "engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)\n",
        ["deepspeed.initialize(", "TODO(ckptkit)"],
        "manual",
    ),
    "model_copies": (
        f"{HEAD}model = nn.Linear(4, 4)\nmodel = DDP(model)\nema = copy.deepcopy(model)\n",
        ["ema = copy.deepcopy(model)", "fully_shard(ema"],
        "exact",
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_writes_and_says_what_its_page_says(rule: str, migrated: Callable[..., Any]) -> None:
    code, expected, grades = CASES[rule]
    result = migrated(code)
    missing = [text for text in expected if text not in result.text]
    assert missing == [], result.text
    found = {str(finding.grade.value) for finding in result.report.findings if finding.rule == rule.replace("_", "-")}
    assert found & set(grades.split()), [str(finding) for finding in result.report.findings]


def test_the_copy_is_made_before_the_sharding(migrated: Callable[..., Any]) -> None:
    text = migrated(CASES["model_copies"][0]).text
    assert text.index("ema = copy.deepcopy(model)") < text.index("fully_shard(model")
