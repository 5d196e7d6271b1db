"""Settings of transformers and accelerate in code: what becomes FSDP2, what is left and what the TODO says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit import migrate

HEAD = "from transformers import TrainingArguments\n"
TWO = 'fsdp_config={"version": 2, "reshard_after_forward": '
CASES = {
    'TrainingArguments("o", fsdp="full_shard auto_wrap")':
        'TrainingArguments("o", fsdp="full_shard auto_wrap", ' + TWO + "True})",
    'TrainingArguments("o", fsdp=["shard_grad_op", "offload"], fsdp_config={"use_orig_params": False})':
        'TrainingArguments("o", fsdp="full_shard offload", fsdp_config={"version": 2, "reshard_after_forward": False})',
    'TrainingArguments("o", fsdp=True, fsdp_config={"fsdp_version": 1, "limit_all_gathers": True, "x": [1]})':
        'TrainingArguments("o", fsdp=True, fsdp_config={"fsdp_version": 2, "reshard_after_forward": True, "x": [1]})',
    'TrainingArguments(\n    "o",\n    fsdp="full_shard",  # all of it\n    fsdp_config={\n        # what\n'
    '        "backward_prefetch": "backward_pre",\n        "sync_module_states": True,\n'
    '        "min_num_params": 9,\n    },\n)':
        'TrainingArguments(\n    "o",\n    fsdp="full_shard",  # all of it\n    fsdp_config={\n        # what\n'
        '        "version": 2,\n        "reshard_after_forward": True,\n        "min_num_params": 9,\n    },\n)',
    'TrainingArguments("o", deepspeed={"zero_optimization": {"stage": 3}})':
        'TrainingArguments("o", fsdp="full_shard auto_wrap", ' + TWO + "True})",
    'TrainingArguments("o", deepspeed={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})':
        'TrainingArguments(\n    "o", fsdp="full_shard auto_wrap", '
        'fsdp_config={"version": 2, "reshard_after_forward": False, "cpu_offload": True}\n)',
}  # fmt: skip
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


@pytest.mark.parametrize(("before", "after"), CASES.items())
def test_training_arguments(before: str, after: str, migrated: Callable) -> None:
    found = migrated(HEAD + f"a = {before}\n")
    assert found.text == HEAD + f"a = {after}\n" and not found.report.manual


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
    assert '"fsdp": "full_shard",\n    "lr": 1,\n    "fsdp_config": {"version": 2, ' in found.text
    assert f'fsdp="full_shard", {TWO}True}}, **common)' in found.text.replace("\n", "").replace("    ", "")
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
        '{\n    "transformer_layer_cls_to_wrap": ["B"],\n    "version": 2\n}\n'
    )
    assert 'fsdp_config={"version": 2, "reshard_after_forward": True}' in (tmp_path / "ds.py").read_text()
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


def flat(text: str) -> str:
    return " ".join(text.split()).replace("( ", "(").replace(" )", ")").replace(",)", ")")


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
