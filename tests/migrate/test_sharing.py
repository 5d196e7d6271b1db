"""What a wrap that is left to a person takes stays as it is, whatever other wraps of the program are given it too."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Runner

HEAD = """
import functools
import torch
from torch.distributed.fsdp import (
    CPUOffload, FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap
# here
"""
LEFT = "b = FSDP(b, {}, **unknown)\n"


def body(text: str) -> str:
    return "".join(line for line in text[text.index("# here") :].splitlines(True) if not line.lstrip().startswith("#"))


SHARED = {
    "chosen": ("mp = MixedPrecision(param_dtype=torch.bfloat16) if amp else None\n", "mixed_precision=mp"),
    "made by a function": (
        "def get():\n    return MixedPrecision(param_dtype=torch.bfloat16) if amp else None\n\n\nmp = get()\n",
        "mixed_precision=mp",
    ),
    "one of a dict": (
        "kinds = {1: MixedPrecision(param_dtype=torch.bfloat16), 2: MixedPrecision(param_dtype=torch.float16)}\n",
        "mixed_precision=kinds[n]",
    ),
    "literal": ("mp = MixedPrecision(param_dtype=torch.bfloat16)\n", "mixed_precision=mp"),
    "policy": ("policy = ModuleWrapPolicy({Block})\n", "auto_wrap_policy=policy"),
    "offload": ("off = CPUOffload(offload_params=True)\n", "cpu_offload=off"),
    "answers": (
        "def choose(m):\n    return {'sharding_strategy': ShardingStrategy.SHARD_GRAD_OP}\n\n\n"
        "policy = CustomPolicy(choose)\n",
        "auto_wrap_policy=policy",
    ),
}


@pytest.mark.parametrize(("made", "argument"), SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("left_first", [True, False])
def test_the_object_stays_for_the_wrap_that_stays(
    migrated: Callable, made: str, argument: str, left_first: bool
) -> None:
    wraps = [LEFT.format(argument), f"a = FSDP(a, {argument})\n"]
    text = body(migrated(HEAD + made + "".join(wraps if left_first else wraps[::-1])).text)
    assert made in text and wraps[0] in text
    alone = body(migrated(HEAD + made + wraps[1]).text)
    assert "fully_shard(a" in alone and "FSDP(" not in alone


def test_wraps_that_share_through_others_are_found(migrated: Callable) -> None:
    code = (
        "def one(m):\n    return {'sharding_strategy': ShardingStrategy.SHARD_GRAD_OP}\n\n\n"
        "first, mp = CustomPolicy(one), MixedPrecision(param_dtype=torch.bfloat16) if amp else None\n"
        "a = FSDP(a, mixed_precision=mp)\n"
        "c = FSDP(c, auto_wrap_policy=first, mixed_precision=mp)\n" + LEFT.format("auto_wrap_policy=first")
    )
    text = body(migrated(HEAD + code).text)
    assert "c = FSDP(c, auto_wrap_policy=first, mixed_precision=mp)" in text  # its policy is that of b
    assert "policy_of(mp, root=True)" in text and "MixedPrecision(param_dtype=torch.bfloat16) if amp" in text


def test_a_method_of_models_of_both_kinds_is_left(migrated: Callable) -> None:
    code = (
        "def clip(m):\n    return m.clip_grad_norm_(1.0)\n\n\na = FSDP(a)\nb = FSDP(b, **unknown)\nclip(a)\nclip(b)\n"
    )
    found = migrated(HEAD + code)
    assert "some stay FSDP1 and some become FSDP2" in found.text and "return m.clip_grad_norm_(1.0)" in found.text


def test_a_context_stays_for_what_is_wrapped_in_it(migrated: Callable) -> None:
    code = (
        "with enable_wrap(wrapper_cls=FSDP):\n    a = wrap(a)\n"
        "    b = [wrap(y, auto_wrap_policy=ModuleWrapPolicy({Block})) for y in ys]\n"
    )
    text = body(migrated(HEAD + code).text)
    assert "with enable_wrap(wrapper_cls=FSDP):\n    fully_shard(a)\n    b = [wrap(y, " in text


def test_what_stays_says_why(migrated: Callable) -> None:
    code = "mp = MixedPrecision(param_dtype=torch.bfloat16)\na = FSDP(a, mixed_precision=mp)\n"
    found = migrated(HEAD + code + LEFT.format("mixed_precision=mp"))
    assert any("stays, because the wrap in line" in finding.message for finding in found.report.findings)
    assert found.text.count("TODO") == 1


@pytest.mark.slow
def test_a_program_of_both_kinds_runs(migrated: Callable, runner: Runner, tmp_path: Path) -> None:
    code = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from record import record
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if os.environ["RANK"] else None
    policy = ModuleWrapPolicy({nn.Linear})
    unknown = dict([("use_orig_params", True)])
    a, b = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Linear(4, 1)
    a = FSDP(a, auto_wrap_policy=policy, mixed_precision=mp, device_id=cpu, use_orig_params=True)
    b = FSDP(b, auto_wrap_policy=policy, mixed_precision=mp, device_id=cpu, **unknown)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1, foreach=False)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(3, 4)
        loss = (a(x) - b(x)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    record(losses)
    """
    before = textwrap.dedent(code)
    after = migrated(before).text
    assert "policy_of(mp" in after and "b = FSDP(b" in after
    losses = []
    for name, text in {"before": before, "after": after}.items():
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        losses.append(runner.run(script, cwd=tmp_path)["losses"])
    assert losses[0] == losses[1] and len(set(losses[0])) == 4
