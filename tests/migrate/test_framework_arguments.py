"""Settings of transformers and accelerate in code: what becomes FSDP2, what is left and what the TODO says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SCRIPTS, Runner
from test_pairs import largest_difference

from ckptkit import migrate

HEAD = "from transformers import TrainingArguments\n"
LOADING = '"cpu_ram_efficient_loading": True'
TWO = '{"version": 2, "reshard_after_forward": '
CASES = {
    'fsdp="full_shard auto_wrap"': f'fsdp="full_shard auto_wrap", fsdp_config={TWO}True, {LOADING}}}',
    'fsdp=["shard_grad_op", "offload"], fsdp_config={"use_orig_params": False}':
        f'fsdp="full_shard offload", fsdp_config={TWO}False, {LOADING}}}',
    'fsdp=True, fsdp_config={"fsdp_version": 1, "limit_all_gathers": True, "x": [1]}':
        f'fsdp=True, fsdp_config={{"fsdp_version": 2, "reshard_after_forward": True, {LOADING}, "x": [1]}}',
    'fsdp="full_shard", fsdp_config={"sync_module_states": False}': f'fsdp="full_shard", fsdp_config={TWO}True}}',
    'fsdp="full_shard", fsdp_config={"cpu_ram_efficient_loading": False}':
        'fsdp="full_shard", fsdp_config={"cpu_ram_efficient_loading": False, "version": 2, '
        '"reshard_after_forward": True}',
    'deepspeed={"zero_optimization": {"stage": 3}}':
        f'fsdp="full_shard auto_wrap", fsdp_config={TWO}True, {LOADING}}}',
    'deepspeed={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}':
        f'fsdp="full_shard auto_wrap", fsdp_config={TWO}False, {LOADING}, "cpu_offload": True}}',
}  # fmt: skip
BLOCK = """\
a = TrainingArguments(
    "o",
    fsdp="full_shard",  # all of it
    fsdp_config={
        # what
        "backward_prefetch": "backward_pre",
        "sync_module_states": False,
        "min_num_params": 9,
    },
)
"""
LEFT = {
    'TrainingArguments("o", fsdp="no_shard")': "no_shard is DDP",
    'TrainingArguments("o", fsdp="hybrid_shard auto_wrap")': "parallelism_config",
    'TrainingArguments("o", fsdp="full_shard", fsdp_config={"state_dict_type": "LOCAL_STATE_DICT"})': "ckptkit convert",
    'TrainingArguments("o", fsdp=cli.fsdp)': "only known at run time",
    'TrainingArguments("o", fsdp="full_shard", fsdp_config=cli.config)': "only known at run time",
    'TrainingArguments(deepspeed=cli.config, **more)': "**kwargs",
    'TrainingArguments("o", deepspeed="absent.json")': 'fsdp_config={"version": 2',
    'TrainingArguments("o", deepspeed={"zero_optimization": {"stage": 0}})': "is DDP",
    'TrainingArguments("o", deepspeed={"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})':
        "nvme",
    'TrainingArguments("o", deepspeed={"zero_optimization": {"stage": 1}, "optimizer": {"type": "Lamb"}})':
        "and optim for the optimizer Lamb",
    'TrainingArguments("o", max_grad_norm=0.5, deepspeed={"zero_optimization": {"stage": 1}})': "max_grad_norm=1.0",
}  # fmt: skip
UNTOUCHED = (
    'TrainingArguments("o")',
    'TrainingArguments("o", fsdp="", deepspeed=None, fsdp_config={"xla": True})',
    'TrainingArguments("o", fsdp=True, fsdp_config={"version": 2})',
    'TrainingArguments("o", fsdp="full_shard")  # ckptkit: skip',
    'Mine("o", fsdp="full_shard auto_wrap")',
)


def flat(text: str) -> str:
    return " ".join(text.split()).replace("( ", "(").replace(" )", ")").replace(",)", ")")


@pytest.mark.parametrize(("before", "after"), CASES.items())
def test_training_arguments(before: str, after: str, migrated: Callable) -> None:
    found = migrated(HEAD + f'a = TrainingArguments("o", {before})\n')
    assert flat(found.text) == flat(HEAD + f'a = TrainingArguments("o", {after})') and not found.report.manual


def test_entries_on_lines_of_their_own_stay_there(migrated: Callable) -> None:
    new = '        "version": 2,\n        "reshard_after_forward": True,\n'
    old = '        "backward_prefetch": "backward_pre",\n        "sync_module_states": False,\n'
    assert migrated(HEAD + BLOCK).text == HEAD + BLOCK.replace(old, new)


def test_without_the_broadcast_the_report_says_so(migrated: Callable) -> None:
    assert "same weights" in migrated(HEAD + BLOCK).report.findings[0].message
    found = migrated(HEAD + BLOCK.replace("False", "True"))
    assert LOADING in found.text and "same weights" not in found.report.findings[0].message


@pytest.mark.parametrize(("code", "said"), LEFT.items())
def test_training_arguments_that_are_left(code: str, said: str, migrated: Callable) -> None:
    found = migrated(HEAD + f"cli = more = object()\na = {code}\n")
    assert f"a = {code}\n" in found.text and found.text.count("# TODO(ckptkit): ") == 1
    assert [said in one.message for one in found.report.manual] == [True], found.report.manual


@pytest.mark.parametrize("code", UNTOUCHED)
def test_training_arguments_that_are_none_of_ours(code: str, untouched: Callable) -> None:
    untouched(HEAD + f"class Mine(dict): pass\na = {code}\n")


def test_settings_in_a_dict_that_is_unpacked(migrated: Callable) -> None:
    code = HEAD + 'common = {"seed": 1}\nmore = {\n    "fsdp": "shard_grad_op",\n    "lr": 1,\n}\n'
    found = migrated(
        code + 'a = TrainingArguments("o", **more)\nb = TrainingArguments("o", fsdp="full_shard", **common)\n'
    )
    assert f'"fsdp": "full_shard", "lr": 1, "fsdp_config": {TWO}False, {LOADING}}}' in flat(found.text)
    assert f'fsdp="full_shard", fsdp_config={TWO}True, {LOADING}}}, **common)' in flat(found.text)
    assert not found.report.manual


def test_a_default_in_a_class_of_the_users_own_is_left(migrated: Callable) -> None:
    code = HEAD + 'class Mine(TrainingArguments):\n    fsdp: str = "full_shard auto_wrap"\n    lr: float = 1.0\n'
    assert ["a default of fsdp" in one.message for one in migrated(code).report.manual] == [True]


def test_low_precision_is_graded_numerics(migrated: Callable) -> None:
    found = migrated(HEAD + 'a = TrainingArguments("o", bf16=True, fsdp="full_shard")\n')
    assert found.grades == ["numerics"] and "with bf16" in found.report.findings[0].message


def test_a_config_beside_the_code_is_migrated_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        HEAD + 'a = TrainingArguments("o", fsdp="full_shard", fsdp_config="fsdp.json")\n'
    )
    (tmp_path / "ds.py").write_text(HEAD + 'a = TrainingArguments("o", deepspeed="zero3.json")\n')
    (tmp_path / "fsdp.json").write_text(
        '{\n    "transformer_layer_cls_to_wrap": ["B"],\n    "use_orig_params": true\n}\n'
    )
    (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}))
    report = migrate.run([tmp_path], write=True)
    assert not report.manual and {one.path.name for one in report.changed} == {"ds.py", "fsdp.json"}
    assert (tmp_path / "fsdp.json").read_text() == (
        '{\n    "transformer_layer_cls_to_wrap": ["B"],\n    "version": 2,\n    "cpu_ram_efficient_loading": true\n}\n'
    )
    assert f"fsdp_config={TWO}True, {LOADING}}}" in flat((tmp_path / "ds.py").read_text())
    assert not migrate.run([tmp_path]).changed


PLUGIN = """
import torch
from functools import partial
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy, size_based_auto_wrap_policy
from models import Block, other
"""
PLUGINS = {
    "": 'fsdp_version=2, reshard_after_forward=True, state_dict_type="FULL_STATE_DICT"',
    'sharding_strategy="SHARD_GRAD_OP", state_dict_type="sharded_state_dict"':
        'fsdp_version=2, reshard_after_forward=False, state_dict_type="sharded_state_dict"',
    "sharding_strategy=ShardingStrategy.FULL_SHARD, auto_wrap_policy=ModuleWrapPolicy([Block])":
        'fsdp_version=2, reshard_after_forward=True, transformer_cls_names_to_wrap=["Block"], '
        'state_dict_type="FULL_STATE_DICT", auto_wrap_policy="transformer_based_wrap"',
    "use_orig_params=True, auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=1000)":
        'fsdp_version=2, reshard_after_forward=True, min_num_params=1000, state_dict_type="FULL_STATE_DICT", '
        'auto_wrap_policy="size_based_wrap"',
}  # fmt: skip
PLUGINS_LEFT = {
    'sharding_strategy="NO_SHARD"': "is DDP",
    "sharding_strategy=ShardingStrategy.HYBRID_SHARD": "parallelism_config",
    'state_dict_type="LOCAL_STATE_DICT"': "ckptkit convert",
    "auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=other)": "no policy object",
    "sharding_strategy=other": "only known at run time",
    "**other": "by name",
    "mixed_precision_policy=other": "must be a MixedPrecisionPolicy",
    "cpu_offload=other": "CPUOffloadPolicy",
}


@pytest.mark.parametrize(("given", "new"), PLUGINS.items())
def test_plugins(given: str, new: str, migrated: Callable) -> None:
    found = migrated(PLUGIN + f"plugin = FullyShardedDataParallelPlugin({given})\n")
    assert f"FullyShardedDataParallelPlugin({new})" in flat(found.text) and not found.report.manual


@pytest.mark.parametrize(("given", "said"), PLUGINS_LEFT.items())
def test_plugins_that_are_left(given: str, said: str, migrated: Callable) -> None:
    found = migrated(PLUGIN + f"plugin = FullyShardedDataParallelPlugin({given})\n")
    assert f"FullyShardedDataParallelPlugin({given})" in found.text
    assert said in " ".join(one.message for one in found.report.manual)


def test_a_plugin_of_fsdp2_is_left_alone(untouched: Callable) -> None:
    untouched("from accelerate import FullyShardedDataParallelPlugin as P\np = P(fsdp_version=2, cpu_offload=True)\n")


def test_a_model_that_is_prepared_alone_is_reported(migrated: Callable) -> None:
    code = PLUGIN + "a = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())\nmodel = a.prepare(other)\n"
    assert not migrated(code).report.manual  # no model by its name
    found = migrated(code.replace("prepare(other)", "prepare(model)"))
    assert ["accelerator.prepare(model, optimizer)" in one.message for one in found.report.manual] == [True]


def test_a_deepspeed_plugin_is_reported_with_what_to_write(migrated: Callable) -> None:
    given = 'DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", gradient_accumulation_steps=4)'
    [finding] = migrated(PLUGIN + f"plugin = {given}\n").report.manual
    for part in ("reshard_after_forward=True", "cpu_offload=True", "gradient_accumulation_steps=4", "1.0) before each"):
        assert part in finding.message


@pytest.mark.slow
def test_without_the_broadcast_the_losses_part(runner: Runner, tmp_path: Path) -> None:
    """The control of the pair under DeepSpeed, whose ranks build other weights: the pair itself must not be able to."""
    pytest.importorskip("deepspeed")
    after = SCRIPTS / "trainer_arguments" / "deepspeed" / "after.py"
    script = tmp_path / "train.py"
    script.write_text(after.read_text().replace(f", {LOADING}", ""))
    whole, control = (runner.run(path, cwd=tmp_path, timeout=150) for path in (after, script))
    assert largest_difference(whole["losses"], control["losses"]) > 1e-2
