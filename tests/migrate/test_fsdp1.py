"""FSDP1's rarer constructs on small snippets, and controls of their pairs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SCRIPTS, Runner
from test_controls import difference
from test_pairs import largest_difference

HEAD = """
import contextlib
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload, FlatParameter, FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel as FSDP,
    MixedPrecision, OptimStateKeyType, ShardingStrategy, StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
# here
"""


@pytest.fixture
def rewritten(migrated: Callable) -> Callable[..., str]:
    """What follows the imports of a migrated snippet, with the lines of a TODO joined."""

    def run(code: str, **options: object) -> str:
        found = migrated(HEAD + code, **options)
        compile(found.text, "train.py", "exec")
        return re.sub(r"\s*\n\s*#   ", " ", found.text[found.text.index("# here") :])

    return run


@pytest.mark.parametrize(
    ("pair", "old", "new"),
    [
        ("optimizer_state_dict/handed_on", "    set_optimizer_state_dict(model, optimizer, state, ", "    dict("),
        ("optimizer_state_dict/handed_on", "enumerate(params)", "enumerate(reversed(params))"),
        ("wrap_policy/custom_dicts", "**(chosen[unit] if isinstance(chosen[unit], dict) else {})", ""),
        ("wrapper_attributes", "with full_params(model):\n", "if True:\n"),
        ("gradient_clipping/maybe_plain", "norm.full_tensor() if isinstance(norm, DTensor) else norm", "norm"),
    ],
)
@pytest.mark.slow
def test_each_part_of_the_output_is_needed(runner: Runner, tmp_path: Path, pair: str, old: str, new: str) -> None:
    after = (SCRIPTS / pair / "after.py").read_text()
    assert old in after
    assert difference(runner, tmp_path, pair, after.replace(old, new)) > 1e-4


@pytest.mark.parametrize(
    ("context", "options"),
    [
        ("FSDP.state_dict_type(model, **dict(state_dict_type=StateDictType.SHARDED_STATE_DICT))", ""),
        (
            "FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT if full else StateDictType.SHARDED_STATE_DICT)",
            ", options=StateDictOptions(full_state_dict=full)",
        ),
        (
            "FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT if parts else StateDictType.FULL_STATE_DICT)",
            ", options=StateDictOptions(full_state_dict=not parts)",
        ),
        (
            "FSDP.state_dict_type(model, kinds[0])",
            ", options=StateDictOptions(full_state_dict=kinds[0] == StateDictType.FULL_STATE_DICT)",
        ),
        (
            "FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT) if full else contextlib.nullcontext()",
            ", options=StateDictOptions(full_state_dict=True)",
        ),
    ],
)
def test_every_shape_of_the_context(rewritten: Callable, context: str, options: str) -> None:
    text = rewritten(f"model = FSDP(model)\nwith {context}:\n    state = model.state_dict()\n")
    assert f"state = get_model_state_dict(model{options})" in text and "TODO" not in text


def test_a_sharded_kind_or_none_is_left(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\n"
        "with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT) if on else contextlib.nullcontext():\n"
        "    state = model.state_dict()\n"
    )
    assert "state = model.state_dict()" in text and "TODO" in text


def test_configs_that_go_with_a_kind_chosen_at_run_time_are_left(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\nwith FSDP.state_dict_type(model, kind, config):\n    state = model.state_dict()\n"
    )
    assert "with FSDP.state_dict_type(model, kind, config):" in text and "state = model.state_dict()" in text


def test_a_kind_that_is_restored_is_the_one_before(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\nold = FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)\n"
        "a = model.state_dict()\nFSDP.set_state_dict_type(model, old.state_dict_type, old.state_dict_config)\n"
        "b = model.state_dict()\n"
    )
    assert text == (
        "# here\nfully_shard(model)\na = get_model_state_dict(model)\n"
        "b = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))\n"
    )


def test_a_local_kind_around_the_optimizers_own_state_goes(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\nopt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)\n"
        "with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):\n    torch.save(opt.state_dict(), path)\n"
    )
    assert "LOCAL" not in text and text.endswith("torch.save(opt.state_dict(), path)\n")


def test_a_local_kind_says_what_to_do(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\nwith FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):\n"
        "    torch.save(model.state_dict(), path)\n"
    )
    assert "get_model_state_dict(model)} with torch.distributed.checkpoint" in text and "ckptkit convert" in text


def test_a_state_loaded_in_another_function_is_not_spelled_in_its_names(rewritten: Callable) -> None:
    text = rewritten(
        "def read(net, opt):\n    return FSDP.optim_state_dict_to_load(net, opt, torch.load('o.pt'))\n\n\n"
        "model = FSDP(model)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "optimizer.load_state_dict(read(model, optimizer))\n"
    )
    assert "return optimizer_state_to_load(net, opt, own_steps(torch.load('o.pt')), full_state_dict=True)" in text
    assert "optimizer.load_state_dict(read(model, optimizer))" in text


def test_a_scatter_that_names_no_optimizer_says_what_to_do(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\n\n\ndef f(full):\n    return FSDP.scatter_full_optim_state_dict(full, model)\n"
    )
    assert "TODO(ckptkit)" in text
    assert (
        "set_optimizer_state_dict(model, optimizer, full or {}, options=StateDictOptions(full_state_dict=True" in text
    )


def test_states_keyed_by_number(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\noptim = torch.optim.SGD(model.parameters(), 0.1)\n"
        "osd = FSDP.rekey_optim_state_dict(osd, OptimStateKeyType.PARAM_NAME, model)\n"
        "ids = FSDP.rekey_optim_state_dict(osd, OptimStateKeyType.PARAM_ID, model, optim=optim)\n"
        "other = FSDP.rekey_optim_state_dict(osd, kind, model)\n"
    )
    assert "osd = rekeyed(osd, model)\nids = rekeyed(osd, model, optimizer=optim, to_names=False)\n# TODO" in text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("{'sharding_strategy': ShardingStrategy.FULL_SHARD}", "{'reshard_after_forward': True}"),
        ("{'cpu_offload': CPUOffload(True)}", "{'offload_policy': CPUOffloadPolicy()}"),
        ("{'cpu_offload': CPUOffload()}", "{'offload_policy': OffloadPolicy()}"),
        (
            "{'mixed_precision': MixedPrecision(param_dtype=torch.bfloat16)}",
            "{'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)}",
        ),
    ],
)
def test_arguments_that_a_policy_answers(rewritten: Callable, answer: str, expected: str) -> None:
    code = f"def choose(m):\n    return {answer} if isinstance(m, Block) else False\n\n\n"
    text = rewritten(code + "model = FSDP(model, auto_wrap_policy=CustomPolicy(choose))\n")
    assert expected in text and "shard_by_choice(model, choose=choose)" in text


@pytest.mark.parametrize(
    "answer",
    ["{'sharding_strategy': ShardingStrategy.NO_SHARD}", "{'device_id': 0}", "{**given}", "{key: 1}", "given()"],
)
def test_answers_out_of_reach_leave_the_program_as_it_is(migrated: Callable, answer: str) -> None:
    code = (
        "def given():\n    return dict_of(1) or {'ignored_modules': []}\n\n\n"
        f"def choose(m):\n    return {answer} if isinstance(m, Block) else False\n\n\n"
        "model = FSDP(model, auto_wrap_policy=CustomPolicy(choose))\n"
    )
    found = migrated(HEAD + code)
    assert f"return {answer} if" in found.text and "FSDP(model, auto_wrap_policy=CustomPolicy(choose))" in found.text
    assert found.grades == ["manual"]


def test_ignored_states_may_be_both(rewritten: Callable) -> None:
    text = rewritten("model = FSDP(model, ignored_states=[model.a])\n")
    assert "isinstance(s, nn.Module)" in text and "isinstance(s, nn.Parameter)" in text and "TODO" not in text
    text = rewritten("model = FSDP(model, ignored_parameters=frozen)\n")
    assert "ignored_params = set(frozen)\nfully_shard(model, ignored_params=ignored_params)" in text


def test_attributes_of_the_program_stay(rewritten: Callable) -> None:
    net = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.rank = 3\n\n\n"
    assert "print(model.rank)" in rewritten(net + "model = FSDP(Net())\nprint(model.rank)\n")
    assert "print(dist.get_rank())" in rewritten("model = FSDP(model)\nprint(model.rank)\n")
    assert "TODO" in rewritten("model = FSDP(model, process_group=group)\nprint(model.rank)\n")
    assert "other.rank" in rewritten("model = FSDP(model)\nprint(other.rank)\n")
    assert "is True" in rewritten("model = FSDP(model)\nassert model.check_is_root()\n")


def test_the_value_of_apply_is_announced(migrated: Callable) -> None:
    found = migrated(HEAD + "model = FSDP(model)\nmodel = model.apply(init)\n")
    assert "numerics" in found.grades and "model = model.apply(init)" in found.text


@pytest.mark.slow
def test_a_pair_of_groups_on_four_ranks(runner: Runner, tmp_path: Path) -> None:
    pair = SCRIPTS / "process_group" / "pair"
    before, after = (runner.run(pair / f"{name}.py", cwd=tmp_path, world=4) for name in ("before", "after"))
    # On four ranks two replicas of two shards are averaged in another order.
    assert largest_difference(before, after) < 1e-6
    code = (pair / "after.py").read_text()
    # Without the replicate dimension each row of ranks trains on its own.
    unpack, alone = "shard, replicate = groups\n", "return DeviceMesh.from_group(groups[0], device_type)\n"
    apart = code.replace(unpack, alone)
    assert apart != code
    script = tmp_path / "apart.py"
    script.write_text(apart)
    assert largest_difference(before, runner.run(script, cwd=tmp_path, world=4)) > 1e-3
