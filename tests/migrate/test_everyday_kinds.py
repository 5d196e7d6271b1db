"""Kinds of failure that everyday programs showed: guards of one rank in every spelling, several models, quotes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SCRIPTS, RunError, Runner

DDP = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

class LM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.layer(x)
    def sample(self, x):
        return self.layer(x).argmax()

def only_on_main(fn):
    return lambda *args: fn(*args) if dist.get_rank() == 0 else None

def main(rank):
    raw = LM()
    model = DDP(raw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.step()
"""
FSDP = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
"""
SAVE = "torch.save(model.module.state_dict(), 'a')"
ONE_RANK = {
    "a conditional expression": "state = model.module.state_dict() if rank == 0 else None",
    "the else of the others": "if rank != 0:\n        pass\n    else:\n        SAVE",
    "a name": "leader = rank == 0\n    if leader:\n        SAVE",
    "and": "rank == 0 and SAVE",
    "a loop": "for one in range(2):\n        if rank > 0:\n            continue\n        SAVE",
}


@pytest.mark.parametrize("code", ONE_RANK.values(), ids=ONE_RANK)
def test_a_gather_stands_before_what_one_rank_runs(code: str, migrated: Callable) -> None:
    found = migrated(f"{DDP}    {code.replace('SAVE', SAVE)}\n")
    assert "manual" not in found.grades
    main = next(n for n in ast.parse(found.text).body if isinstance(n, ast.FunctionDef) and n.name == "main")
    lines = found.text.splitlines()
    at = next(n.lineno for n in ast.walk(main) if isinstance(n, ast.Call) and "get_model_state" in ast.unparse(n.func))
    asks = next(number for number, line in enumerate(lines, 1) if "rank" in line and number > main.lineno + 8)
    used = next(number for number, line in enumerate(lines, 1) if "model_state" in line and number > at)
    assert "cpu_offload=True" in "".join(lines[at - 1 : at + 2]) and at < used
    assert at < asks or "leader = rank == 0" in lines[asks - 1]


def test_a_decorated_function_is_said(migrated: Callable) -> None:
    found = migrated(f"""{DDP}    save(model)

@rank_zero_only
def save(model):
    torch.save(model.state_dict(), "a")
""")
    assert "TODO(ckptkit): all ranks must run this, and the decorator lets one" in found.text


@pytest.mark.parametrize("call", ["raw(x)", "model.module(x)", "raw.sample(x)", "model.module.sample(x)"])
def test_a_model_that_one_rank_runs_is_said_under_any_name(call: str, migrated: Callable) -> None:
    found = migrated(f"{DDP}    x = torch.ones(1, 4)\n    if rank == 0:\n        print({call})\n")
    assert "TODO(ckptkit): all ranks must run this" in found.text
    found = migrated(f"{DDP}    x = torch.ones(1, 4)\n    print({call})\n")
    assert "manual" not in found.grades


def test_each_optimizer_goes_with_its_own_model(migrated: Callable) -> None:
    text = migrated("""
import torch
from torch.nn.parallel import DistributedDataParallel

def wrap(m):
    return DistributedDataParallel(m)

def main():
    actor, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    actor = wrap(actor)
    critic = wrap(critic)
    first = torch.optim.Adam(actor.parameters())
    second = torch.optim.Adam(critic.parameters())
    critic(actor(torch.ones(1, 2))).sum().backward()
    torch.save({"first": first.state_dict(), "second": second.state_dict()}, "a.pt")
""").text
    flat = " ".join(text.split()).replace("( ", "(")
    assert "get_optimizer_state_dict(actor, first" in flat and "get_optimizer_state_dict(critic, second" in flat


def test_new_text_in_an_f_string_has_the_other_quotes(migrated: Callable) -> None:
    text = migrated("""
import deepspeed
import torch

net = torch.nn.Linear(2, 2)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
loss = engine(torch.ones(1, 2)).sum()
engine.backward(loss)
engine.step()
print(f"lr {engine.get_lr()[0]:.6f}")
print(f'lr {engine.get_lr()[0]:.6f}')
""").text
    ast.parse(text)
    assert """f"lr {[group['lr'] for""" in text and """f'lr {[group["lr"] for""" in text


def test_methods_of_the_wrapper_on_what_cannot_be_followed_are_said(migrated: Callable) -> None:
    code = (
        FSDP
        + """
class Agent:
    def __init__(self, make, accelerator):
        self.nets = {}
        for name in ("actor", "critic"):
            self.nets[name] = FSDP(make())
        self.accelerator = accelerator

    def step(self):
        for name in self.nets:
            CALL
"""
    )
    found = migrated(code.replace("CALL", "self.nets[name].clip_grad_norm_(0.5)"))
    assert "TODO(ckptkit): if this is a sharded model: torch.nn.utils.clip_grad_norm_" in found.text
    for fine in ("self.accelerator.clip_grad_norm_([], 1.0)", "torch.nn.utils.clip_grad_norm_([], 1.0)"):
        assert "if this is a sharded model" not in migrated(code.replace("CALL", fine)).text


def test_a_choice_of_strategies_keeps_the_mesh_and_is_a_truth(migrated: Callable) -> None:
    """An integer means something else to fully_shard: as many ranks to shard over after the forward."""
    text = migrated(
        FSDP
        + """
def build(net, args):
    return FSDP(
        net, device_id=torch.device("cpu"), auto_wrap_policy=None if args.flat else None,
        sharding_strategy=ShardingStrategy.FULL_SHARD if args.zero3 else ShardingStrategy.SHARD_GRAD_OP)
"""
    ).text
    assert 'init_device_mesh("cpu", (dist.get_world_size(),))' in text
    assert "reshard_after_forward" not in text or "bool(args.zero3)" in text


def test_a_word_within_a_word_is_no_accelerator(migrated: Callable) -> None:
    text = migrated(DDP + "    dist.init_process_group('gloo')\n    inputs = torch.ones(1)\n    json.dumps({})\n").text
    assert "init_device_mesh" in text and '"cpu"' in text


def test_batch_norm_under_a_precision_of_the_run_is_said(migrated: Callable) -> None:
    found = migrated(
        FSDP
        + """
from functools import partial
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

POLICIES = {"bf16": MixedPrecision(param_dtype=torch.bfloat16), "fp16": MixedPrecision(param_dtype=torch.float16)}

def build(kind):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    policy = partial(size_based_auto_wrap_policy, min_num_params=4)
    return FSDP(net, mixed_precision=POLICIES[kind], auto_wrap_policy=policy)
"""
    )
    assert "TODO(ckptkit): FSDP1 kept BatchNorm layers in fp32" in found.text


@pytest.mark.parametrize("held", ["model", "model.module", "{'net': model, 'epoch': 3}"])
def test_a_model_that_is_pickled_is_said(held: str, migrated: Callable) -> None:
    found = migrated(f"{DDP}    torch.save({held}, 'whole.pt')\n")
    assert "TODO(ckptkit): a sharded model does not pickle" in found.text
    assert any(one.rule == "pickled-models" for one in found.report.findings)
    assert "does not pickle" not in migrated(f"{DDP}    torch.save({{'step': step}}, 'a.pt')\n").text


def test_weights_that_are_loaded_with_the_optimizer_come_to_shards(migrated: Callable) -> None:
    """The lines that make and load the optimizer move behind the sharding, and the model's load with them."""
    text = migrated("""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(net, resume):
    optimizer = torch.optim.AdamW(net.parameters())
    if resume:
        checkpoint = torch.load(resume)
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    model = DDP(net)
    return model, optimizer
""").text
    flat = " ".join(text.split()).replace("( ", "(")
    assert 'set_model_state_dict(net, checkpoint["model"], options=StateDictOptions(full_state_dict=True))' in flat
    assert (
        flat.index("fully_shard(net)")
        < flat.index("set_model_state_dict(net")
        < flat.index("set_optimizer_state_dict(model")
    )


@pytest.mark.slow
def test_an_average_that_was_evaluated_is_updated_in_shards(runner: Runner, tmp_path: Path) -> None:
    """As under DDP, which loses nothing. The control: without the helper the walk meets gathered parameters."""
    pair = SCRIPTS / "parameter_walks"
    plain = (
        (pair / "before.py")
        .read_text()
        .replace(
            "def shard(model):",
            """def shard(model):
    trained = any(parameter.requires_grad for parameter in model.parameters())
    return nn.parallel.DistributedDataParallel(model) if trained else model


def unused(model):""",
        )
    )
    (tmp_path / "ddp.py").write_text(plain)
    ddp, migrated = (runner.run(path, cwd=tmp_path) for path in (tmp_path / "ddp.py", pair / "after.py"))
    assert migrated["losses"] == pytest.approx(ddp["losses"], rel=1e-6)
    assert runner.run(pair / "before.py", cwd=tmp_path)["losses"] != pytest.approx(ddp["losses"], rel=1e-3)
    (tmp_path / "broken.py").write_text((pair / "after.py").read_text().replace("module.reshard()", "pass"))
    with pytest.raises(RunError, match="DTensor"):
        runner.run(tmp_path / "broken.py", cwd=tmp_path)


def test_a_walk_over_a_sharded_and_a_whole_model_is_said(migrated: Callable) -> None:
    """A teacher that is no copy and never wrapped."""
    loop = """    teacher = LM()
    for old, new in zip(teacher.parameters(), model.module.parameters()):
        old.data = old.data * 0.9 + new.data * 0.1
"""
    assert "TODO(ckptkit): one of these models is in shards" in migrated(DDP + loop).text


def test_a_wrap_that_is_skipped_keeps_its_methods(migrated: Callable) -> None:
    code = (
        FSDP
        + """
def step(one, nets, make):
    other = FSDP(make())  # ckptkit: skip
    nets["a"] = FSDP(make())
    one.clip_grad_norm_(1.0)
"""
    )
    assert "if this is a sharded model" not in migrated(code).text


@pytest.mark.parametrize("name", ["ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"])
def test_optimizers_for_ddp_alone_are_said(name: str, migrated: Callable) -> None:
    found = migrated(
        f"from torch.distributed.optim import {name}\n{DDP}    optimizer = {name}(model.parameters(), lr=1)\n"
    )
    assert next(one.rule for one in found.report.findings if one.grade == "manual") == "ddp-optimizers"


@pytest.mark.parametrize(("flag", "blocks"), [("", True), (", find_unused_parameters=False", True),
                                              (", find_unused_parameters=True", False),
                                              (", find_unused_parameters=args.unused", False)])  # fmt: skip
def test_ranks_that_may_skip_a_block_get_one_group(flag: str, blocks: bool, migrated: Callable) -> None:
    """Those that skip a block would miss its all-gather, and the others would wait forever."""
    text = migrated(f"""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.layer(x)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def main(args):
    return DDP(Net(){flag})
""").text
    assert ("isinstance(module, Block)" in text) is blocks


@pytest.mark.parametrize("value", ["torch.tensor(1.0)", "torch.ones(())", "torch.ones([]) * 2.6", "torch.tensor(-1)"])
def test_a_scalar_parameter_is_said(value: str, migrated: Callable) -> None:
    code = DDP.replace("self.layer = torch", f"self.scale = torch.nn.Parameter({value})\n        self.layer = torch")
    assert "TODO(ckptkit): fully_shard takes no scalar parameter" in migrated(code).text
    fine = code.replace(value, "torch.ones(1) * 2.6")
    assert [one for one in migrated(fine).report.findings if one.rule == "scalar-parameters"] == []


def test_what_a_context_manager_of_the_program_yields_is_the_model(migrated: Callable) -> None:
    text = migrated(
        FSDP
        + """
from contextlib import contextmanager
from torch.distributed.fsdp import FullStateDictConfig, StateDictType

@contextmanager
def full(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        yield model

def main(net):
    model = FSDP(net)
    with full(model) as inner:
        state = inner.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, "a.pt")
"""
    ).text
    assert "state = get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True" in text


def test_the_state_of_a_part_by_its_index_is_said(migrated: Callable) -> None:
    found = migrated("""
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
torch.save(model.module[1].state_dict(), "head.pt")
""")
    assert "TODO(ckptkit): a part of a sharded model holds shards" in found.text


@pytest.mark.parametrize(("line", "walks"), [("p.mul_(0.9)", True), ("p.grad.mul_(0.9)", False)])
def test_gradients_are_changed_as_they_are(line: str, walks: bool, migrated: Callable) -> None:
    code = f"{DDP}    with torch.no_grad():\n        model(1)\n    for p in model.parameters():\n        {line}\n"
    assert ("resharded(model).parameters()" in migrated(code).text) is walks


def test_warnings_of_python_about_the_code_are_not_printed(
    migrated: Callable, recwarn: pytest.WarningsRecorder
) -> None:
    text = migrated(f"{DDP}    if rank is 0:\n        print(rank)\n").text
    assert "rank is 0" in text and not [one for one in recwarn if issubclass(one.category, SyntaxWarning)]


def test_a_wrapper_as_a_default_is_said(migrated: Callable) -> None:
    found = migrated("""
from torch.nn.parallel import DistributedDataParallel as DDP

def unwrap(model, kinds=(DDP)):
    return model.module if isinstance(model, kinds) else model
""")
    assert "manual" in found.grades
