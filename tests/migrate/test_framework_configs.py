"""YAML, JSON and shell flags of trainers: what changes, what is refused, and what the frameworks then read."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_configs import converted

AXOLOTL = """\
base_model: Qwen/Qwen3-8B  # which
# sharding
fsdp:
  - shard_grad_op   # two
  - auto_wrap
  - offload

# config
fsdp_config:
    # kept
    fsdp_state_dict_type: FULL_STATE_DICT  # full
    fsdp_use_orig_params: false
    fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer
special_tokens:
"""
AXOLOTL_AFTER = """\
base_model: Qwen/Qwen3-8B  # which
# sharding

# config
fsdp_version: 2
fsdp_config:
    # kept
    auto_wrap_policy: TRANSFORMER_BASED_WRAP
    offload_params: true
    reshard_after_forward: false
    state_dict_type: FULL_STATE_DICT  # full
    transformer_layer_cls_to_wrap: Qwen3DecoderLayer
special_tokens:
"""
YAML = {
    AXOLOTL: AXOLOTL_AFTER,
    "base_model: x\nfsdp_version: 1\nfsdp_config:\n  fsdp_offload_params: false\n  fsdp_sharding_strategy: 1":
        "base_model: x\nfsdp_version: 2\nfsdp_config:\n  offload_params: false\n  reshard_after_forward: true",
    "base_model: x\nfsdp: [full_shard, auto_wrap]\nfsdp_config:\na: 1\n":
        "base_model: x\nfsdp_version: 2\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  reshard_after_forward: true\na: 1\n",
    "### model\noutput_dir: o\nfsdp: shard_grad_op auto_wrap # x\nfsdp_config:\n"
    "  use_orig_params: true\n  xla: false\n":
        "### model\noutput_dir: o\nfsdp: full_shard auto_wrap # x\nfsdp_config:\n  version: 2\n"
        "  reshard_after_forward: false\n  cpu_ram_efficient_loading: true\n  xla: false\n",
    "output_dir: o\nfsdp:\n- full_shard\ndeepspeed: null\n":
        "output_dir: o\nfsdp:\n- full_shard\nfsdp_config:\n  version: 2\n  reshard_after_forward: true\n"
        "  cpu_ram_efficient_loading: true\ndeepspeed: null\n",
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 2":
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
        "  fsdp_reshard_after_forward: false",
}  # fmt: skip
REFUSED = {
    "base_model: x\nfsdp: [no_shard]\n": "DDP",
    "base_model: x\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n": "parallelism_config",
    "output_dir: o\nfsdp: full_shard\nfsdp_config:\n  state_dict_type: LOCAL_STATE_DICT\n": "ckptkit convert",
    "output_dir: o\nfsdp: full_shard\nfsdp_config: {use_orig_params: true}\n": "as a block",
    "output_dir: o\ndeepspeed: examples/ds_z3.json\n": "take deepspeed out",
    "base_model: x\ndeepspeed: zero3.json\n": "fsdp_version: 2",
    "output_dir: o\nfsdp: [\n": "cannot be read",
}
LEFT_ALONE = (
    "base_model: x\nfsdp_version: 2\nfsdp_config:\n  fsdp_use_orig_params: true\n",
    "output_dir: o\nfsdp: full_shard\nfsdp_config:\n  version: 2\n  use_orig_params: true\n",
    "output_dir: o\nfsdp: full_shard\nfsdp_config: fsdp.json\n",
    "name: x\nfsdp: true\n",
    "output_dir: o\ndeepspeed:\nfsdp: ''\n",
)


@pytest.mark.parametrize(("before", "after"), YAML.items())
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_yaml(before: str, after: str, newline: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    mark = b"\xef\xbb\xbf" if newline == "\r\n" else b""
    path.write_bytes(mark + before.replace("\n", newline).encode())
    _, report = converted_bytes(tmp_path)
    assert path.read_bytes() == mark + after.replace("\n", newline).encode() and not report.manual


def converted_bytes(folder: Path) -> tuple[None, Any]:
    from ckptkit import migrate

    report = migrate.run([folder], write=True)
    assert not report.failed and not migrate.run([folder]).changed
    return None, report


@pytest.mark.parametrize(("text", "said"), REFUSED.items())
def test_yaml_that_is_refused(text: str, said: str, tmp_path: Path) -> None:
    after, report = converted(tmp_path, "a.yml", text)
    assert after == text and [said in one.message for one in report.manual] == [True], report.manual


@pytest.mark.parametrize("text", LEFT_ALONE)
def test_yaml_that_is_none_of_ours(text: str, tmp_path: Path) -> None:
    after, report = converted(tmp_path, "a.yml", text)
    assert after == text and not report.findings


def test_a_config_that_is_no_utf8_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(AXOLOTL.replace("which", "wél").encode("latin-1"))
    _, report = converted_bytes(tmp_path)
    assert ["not UTF-8" in one.message for one in report.manual] == [True]


SHELL = {
    "accelerate launch --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_use_orig_params true a.py --lr 1":
        "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_state_dict_type FULL_STATE_DICT "
        "--fsdp_reshard_after_forward false a.py --lr 1",
    "A=1 accelerate launch \\\n  --use_fsdp \\\n  --fsdp_sharding_strategy=1 \\\n"
    "  --fsdp_backward_prefetch NO_PREFETCH \\\n  --fsdp_state_dict_type \"SHARDED_STATE_DICT\" \\\n  a.py  # go":
        "A=1 accelerate launch \\\n  --use_fsdp \\\n  --fsdp_version 2 \\\n  --fsdp_reshard_after_forward true \\\n"
        "  --fsdp_state_dict_type \"SHARDED_STATE_DICT\" \\\n  a.py  # go",
    "torchrun a.py --fsdp \"full_shard auto_wrap\" --fsdp_transformer_layer_cls_to_wrap 'L' --tf32 True":
        "torchrun a.py --fsdp \"full_shard auto_wrap\" --fsdp_config "
        "'{\"version\": 2, \"reshard_after_forward\": true, "
        "\"cpu_ram_efficient_loading\": true, \"transformer_layer_cls_to_wrap\": [\"L\"]}' --tf32 True",
    "swift sft --fsdp 'shard_grad_op' --fsdp_config '{\"use_orig_params\": true, \"xla\": false}' && echo done":
        "swift sft --fsdp 'full_shard' --fsdp_config '{\"version\": 2, \"reshard_after_forward\": false, "
        "\"cpu_ram_efficient_loading\": true, \"xla\": false}' && echo done",
}  # fmt: skip
SHELL_LEFT = {
    "accelerate launch --use_fsdp --fsdp_sharding_strategy NO_SHARD a.py": "--multi_gpu",
    "accelerate launch --use_fsdp --fsdp_sharding_strategy HYBRID_SHARD a.py": "dp_replicate_size",
    "accelerate launch --use_fsdp --fsdp_state_dict_type LOCAL_STATE_DICT a.py": "ckptkit convert",
    "accelerate launch --use_fsdp --fsdp_sharding_strategy $S a.py": "not known",
    'torchrun a.py --fsdp "$FSDP"': "shell variables",
    "llamafactory-cli train --fsdp hybrid_shard": "parallelism_config",
}


@pytest.mark.parametrize(("before", "after"), SHELL.items())
def test_flags_in_shell_scripts(before: str, after: str, tmp_path: Path) -> None:
    head = "#!/bin/bash\n# accelerate launch --use_fsdp --fsdp_sharding_strategy 1 train.py\n"
    text, report = converted(tmp_path, "run.sh", f"{head}{before}\necho end\n")
    assert text == f"{head}{after}\necho end\n" and {one.line for one in report.findings} == {3}


@pytest.mark.parametrize(("line", "said"), SHELL_LEFT.items())
def test_flags_that_are_refused(line: str, said: str, tmp_path: Path) -> None:
    text, report = converted(tmp_path, "run.sh", f"\n{line}\n")
    assert text == f"\n{line}\n"
    assert [(one.line, said in one.message) for one in report.manual] == [(2, True)], report.manual


@pytest.mark.parametrize(
    "line",
    ["accelerate launch --use_fsdp --fsdp_version 2 a.py", "ls --fsdp", "echo '--use_fsdp;'", "a --no--use_fsdp"],
)
def test_flags_that_are_none_of_ours(line: str, tmp_path: Path) -> None:
    text, report = converted(tmp_path, "run.sh", f"{line}\n")
    assert text == f"{line}\n" or "ls" in line
    assert not report.manual


@pytest.mark.slow
def test_accelerate_takes_the_flags_as_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    def plugin(line: str) -> FullyShardedDataParallelPlugin:
        args = launch_command_parser().parse_args(shlex.split(line)[2:])
        args.num_processes, args.num_machines, args.mixed_precision = 2, 1, "no"
        args.dynamo_backend = "no"
        with monkeypatch.context() as patch:
            for name, value in prepare_multi_gpu_env(args).items():
                if name.startswith("FSDP_"):
                    patch.setenv(name, value)
            for name in ("SYNC_MODULE_STATES", "CPU_RAM_EFFICIENT_LOADING"):  # FSDP1 wants a GPU for these
                patch.setenv(f"FSDP_{name}", "false")
            return FullyShardedDataParallelPlugin()

    before = next(iter(SHELL))
    text, _ = converted(tmp_path, "run.sh", before + "\n")
    old, new = plugin(before), plugin(text)
    assert (old.fsdp_version, old.sharding_strategy.name) == (1, "SHARD_GRAD_OP")
    assert (new.fsdp_version, new.reshard_after_forward) == (2, False)
    assert old.state_dict_type == new.state_dict_type
    # The control: without the spelled-out type the files would be others.
    assert plugin(text.replace("--fsdp_state_dict_type FULL_STATE_DICT", "")).state_dict_type != old.state_dict_type


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"use_orig_params": True, "min_num_params": 5}},
        {"fsdp": ["full_shard", "offload"], "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block"}},
        {"fsdp": "full_shard"},
    ],
)
def test_transformers_takes_the_settings_as_fsdp2(given: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import HfArgumentParser, TrainingArguments

    (tmp_path / "args").mkdir()
    text, report = converted(
        tmp_path / "args", "args.json", json.dumps({"output_dir": str(tmp_path), **given}, indent=4)
    )
    assert not report.manual
    [args] = HfArgumentParser(TrainingArguments).parse_dict({**json.loads(text), "use_cpu": True, "report_to": []})
    plugin = args.fsdp_plugin_args
    assert plugin["fsdp_version"] == 2 and plugin["reshard_after_forward"] is ("shard_grad_op" not in str(given))
    assert plugin["cpu_ram_efficient_loading"] is True
    assert plugin.get("cpu_offload", False) is ("offload" in str(given))
