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


FSDP_HEAD = """
from dataclasses import dataclass
from typing import NamedTuple
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
"""


@pytest.mark.parametrize("flag", ["", ", use_orig_params=False", ", use_orig_params=True"])
def test_steps_of_full_states_are_parted_unless_each_parameter_had_its_own(
    flag: str, migrated: Callable[..., Any]
) -> None:
    text = migrated(
        f"{FSDP_HEAD}model = FSDP(nn.Linear(4, 4){flag})\noptimizer = torch.optim.Adam(model.parameters())\n"
        "state = FSDP.optim_state_dict_to_load(model, optimizer, torch.load('x.pt'))\n"
        "optimizer.load_state_dict(state)\n"
    ).text
    assert ("own_steps(state)" in text) == ("True" not in flag), text


@pytest.mark.parametrize(
    "head", ["class State(NamedTuple):", "@dataclass(frozen=True)\nclass State:"], ids=["NamedTuple", "dataclass"]
)
def test_a_model_is_followed_into_the_fields_of_a_record(head: str, migrated: Callable[..., Any]) -> None:
    found = migrated(
        f"{FSDP_HEAD}{head}\n    model: nn.Module\n    scaler: ShardedGradScaler\n\n\n"
        "def make():\n    model = FSDP(nn.Linear(4, 4))\n    return State(model, scaler=ShardedGradScaler())\n\n\n"
        "def clip(state: State):\n    state.model.clip_grad_norm_(1.0)\n\n\nclip(make())\n"
    )
    assert "torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)" in found.text
    assert "scaler: torch.amp.GradScaler" in found.text
    assert not found.report.manual, found.report.manual


def test_a_named_tuple_is_unpacked(migrated: Callable[..., Any]) -> None:
    text = migrated(
        f"{FSDP_HEAD}class State(NamedTuple):\n    model: nn.Module\n    step: int\n\n\n"
        "state = State(FSDP(nn.Linear(4, 4)), 0)\nmodel, step = state\nmodel.clip_grad_norm_(1.0)\n"
    ).text
    assert "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in text


def test_an_optimizer_of_groups_that_the_model_makes_is_the_models(migrated: Callable[..., Any]) -> None:
    text = migrated(
        f"{HEAD}model = DDP(nn.Linear(4, 4))\noptimizer = torch.optim.SGD(model.module.groups(0.1), lr=0.1)\n"
        "optimizer.load_state_dict(torch.load('x.pt'))\n"
    ).text
    assert "set_optimizer_state_dict(" in text and "named_state(model, optimizer, torch.load('x.pt'))" in text


def test_a_deepspeed_config_beside_the_script_is_found_by_the_default_of_its_flag(
    migrated: Callable[..., Any],
) -> None:
    text = migrated(
        "import argparse\nimport os\nimport deepspeed\nfrom torch import nn\nparser = argparse.ArgumentParser()\n"
        'parser.add_argument("--deepspeed_config", default=os.path.join(os.path.dirname(__file__), "ds.json"))\n'
        "args = parser.parse_args()\nmodel = nn.Linear(4, 4)\nengine, optimizer, _, _ = deepspeed.initialize("
        "args=args, model=model, model_parameters=model.parameters())\n",
        others={"ds.json": CONFIG + "}"},
    ).text
    assert "lr=0.1" in text and "deepspeed.initialize" not in text


def test_what_is_written_into_a_file_stands_apart_and_leaves_no_gaps(migrated: Callable[..., Any]) -> None:
    text = migrated(
        "import torch\nfrom torch import nn\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "from torch.distributed.fsdp import MixedPrecision\n\nSTEPS = 4\n\n\npolicy = MixedPrecision()\n\n\n"
        "def train():\n    model = FSDP(nn.Linear(4, 4), mixed_precision=policy)\n    with model.no_sync():\n"
        "        model(torch.ones(4)).sum().backward()\n"
    ).text
    assert "set_requires_gradient_sync(True)\n\n\nSTEPS = 4\n\n\ndef train" in text, text


SAVE = """
def save(model, path):
    torch.save(model.state_dict(), path)


def main(rank, path):
    model = DDP(nn.Linear(4, 4))
"""


def test_a_function_that_only_rank_0_called_is_called_by_all_and_left_early(migrated: Callable[..., Any]) -> None:
    found = migrated(
        f"{HEAD}{SAVE}    for step in range(4):\n"
        "        if rank == 0 and step % 2 == 0:\n            save(model, path)\n"
    )
    assert not found.report.manual, found.report.manual
    gathered = (
        "model_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
    )
    assert (
        f"    {gathered}\n    if dist.get_rank() != 0:\n        return\n    torch.save(model_state, path)\n"
        in found.text
    )
    assert "        if step % 2 == 0:\n            save(model, path)\n" in found.text


def test_a_call_at_the_end_of_a_guard_moves_behind_it(migrated: Callable[..., Any]) -> None:
    found = migrated(
        f'{HEAD}{SAVE}    if rank == 0:\n        print("x")\n        if path:\n            save(model, path)\n'
    )
    assert not found.report.manual, found.report.manual
    assert '    if rank == 0:\n        print("x")\n    if path:\n        save(model, path)\n' in found.text


@pytest.mark.parametrize(
    "guarded",
    [
        "    if rank == 0:\n        path = path + 'x'\n        save(model, path)\n",
        "    if rank == 0:\n        save(model, path)\n    else:\n        print(rank)\n",
        "    if rank == 0:\n        save(model, path)\n        print(path)\n",
        "    if rank == 0:\n        for name in path:\n            save(model, name)\n",
        "    if local_rank == 0:\n        save(model, path)\n",
    ],
    ids=["a name of rank 0", "else", "something after it", "a loop", "one of each node"],
)
def test_a_call_that_cannot_leave_its_guard_stays_for_a_person(guarded: str, migrated: Callable[..., Any]) -> None:
    found = migrated(f"{HEAD}{SAVE}{guarded}")
    assert "all ranks must call save" in found.text and len(found.report.manual) == 1


def test_a_method_asks_its_object_for_the_rank_as_its_caller_did(migrated: Callable[..., Any]) -> None:
    text = migrated(
        f"{HEAD}class T:\n    def __init__(self):\n        self.local_rank = 0\n"
        "        self.model = DDP(nn.Linear(4, 4))\n\n"
        "    def save(self):\n        state = self.model.module.state_dict()\n        torch.save(state, 'x.pt')\n\n"
        "    def train(self):\n        if self.local_rank == 0:\n            self.save()\n"
    ).text
    whole = "state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))"
    assert f"        {whole}\n        if self.local_rank != 0:\n            return\n" in text  # every node writes
    assert "    def train(self):\n        self.save()\n" in text


@pytest.mark.parametrize(
    ("test", "offload"),
    [("rank == 0", ", cpu_offload=True"), ("local_rank == 0", ""), ("rank % gpus == 0", "")],
)
def test_states_that_a_rank_of_each_node_writes_are_gathered_for_all(
    test: str, offload: str, migrated: Callable[..., Any]
) -> None:
    text = migrated(
        f"{HEAD}def train(rank, local_rank, gpus, step):\n    model = DDP(nn.Linear(4, 4))\n"
        f"    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n    if step % 2 == 0 and {test}:\n"
        "        torch.save({'m': model.state_dict(), 'o': optimizer.state_dict()}, 'x.pt')\n"
    ).text
    options = f"options=StateDictOptions(full_state_dict=True{offload}))"
    assert text.count("    if step % 2 == 0:\n") == 1  # both are gathered under what else the guard asks for
    assert f"        model_state = get_model_state_dict(model, {options}\n" in text
    assert text.count(options) == 2 or text.count("full_state_dict=True" + offload + ")") == 2


EVALUATED = f"""{HEAD}
@torch.no_grad()
def evaluate(model):
    model(torch.ones(4))


def train(rank):
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        evaluate(model)
"""
SAVED = "    if rank == 0:\n        torch.save({}, 'x.pt')\n"


def test_an_optimizers_state_after_an_evaluation_is_taken_of_a_sharded_model(migrated: Callable[..., Any]) -> None:
    alone = SAVED.format("optimizer.state_dict()")
    assert "get_optimizer_state_dict(\n        resharded(model), optimizer" in migrated(EVALUATED + alone).text
    both = SAVED.format("[model.state_dict(), optimizer.state_dict()]")
    text = migrated(EVALUATED + both).text  # the model's own comes first and shards it
    assert text.index("model_state = ") < text.index("optimizer_state = ") and "resharded" not in text
    assert "resharded" not in migrated((EVALUATED + alone).replace("@torch.no_grad()\n", "")).text


def test_a_model_that_is_loaded_after_evaluations_goes_back_into_shards(migrated: Callable[..., Any]) -> None:
    load = "    model.module.load_state_dict(torch.load('best.pt'))\n"
    assert "set_model_state_dict(resharded(model)," in migrated(EVALUATED + load).text.replace("\n        ", "")
    assert "resharded" not in migrated(EVALUATED.replace("    for _", f"{load}    for _")).text


@pytest.mark.parametrize("condition", ["", "if flag:\n    "], ids=["always", "under a condition"])
def test_buffers_are_broadcast_unless_batch_norm_is_surely_synchronised(
    condition: str, migrated: Callable[..., Any]
) -> None:
    text = migrated(
        f"{HEAD}flag = input()\nmodel = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))\n"
        f"{condition}model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\nmodel = DDP(model)\n"
    ).text
    assert ("register_forward_pre_hook(broadcast_buffers)" in text) == bool(condition), text


def test_files_of_a_compiled_model_are_read_by_clean_names(migrated: Callable[..., Any]) -> None:
    code = (
        f"{FSDP_HEAD}model = torch.compile(FSDP(nn.Linear(4, 4), use_orig_params=True))\n"
        "optimizer = torch.optim.Adam(model.parameters())\nsaved = torch.load('x.pt')\n"
        "model.load_state_dict(saved['model'])\n"
        "state = FSDP.optim_state_dict_to_load(model, optimizer, saved['optimizer'])\n"
        "optimizer.load_state_dict(state)\n"
    )
    text = migrated(code).text
    assert "uncompiled(saved['model'])" in text and "renamed(state)" in text, text
    text = migrated(code.replace("torch.compile(FSDP", "(FSDP")).text
    assert "uncompiled" not in text and "renamed" not in text, text
