"""Configuration files: what changes, what stays byte for byte, what is refused, and what accelerate reads from it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ckptkit import migrate
from ckptkit.migrate import Report

FSDP = """\
    compute_environment: LOCAL_MACHINE
    distributed_type: FSDP  # sharded
    fsdp_config:
      fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
      fsdp_backward_prefetch: BACKWARD_PRE
      # how much is sharded
      fsdp_sharding_strategy: STRATEGY   # a comment
      fsdp_state_dict_type: 'FULL_STATE_DICT'
      fsdp_use_orig_params: true
    machine_rank: 0
    mixed_precision:  bf16
    num_machines: 2
    num_processes: 8
    use_cpu: false
    """
DEEPSPEED = """\
    # eight GPUs
    distributed_type: DEEPSPEED
    deepspeed_config:  # stage
      gradient_clipping: 0.0
      # where
      offload_optimizer_device: cpu
      offload_param_device: cpu
      zero_stage: 3
    machine_rank: 0
    num_machines: 1
    num_processes: 8
    mixed_precision: 'no'
    use_cpu: false
    """


def converted(folder: Path, name: str, text: str) -> tuple[str, Report]:
    """The file after a run that writes; a second run must change nothing."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    report = migrate.run([folder], write=True)
    assert not migrate.run([folder]).changed
    return path.read_text(), report


def test_an_fsdp1_config_keeps_comments_order_and_spacing(tmp_path: Path) -> None:
    text, report = converted(tmp_path, "a.yaml", FSDP.replace("STRATEGY", "SHARD_GRAD_OP"))
    expected = textwrap.dedent(FSDP).replace("fsdp_sharding_strategy: STRATEGY", "fsdp_reshard_after_forward: false")
    expected = expected.replace("  fsdp_backward_prefetch: BACKWARD_PRE\n", "").replace(
        "  fsdp_use_orig_params: true\n", ""
    )
    assert text == expected.replace("fsdp_config:\n", "fsdp_config:\n  fsdp_version: 2\n")
    assert not report.manual


@pytest.mark.parametrize(
    ("strategy", "reshards"),
    [
        ("FULL_SHARD", "true"),
        ("1", "true"),
        ("SHARD_GRAD_OP", "false"),
        ("2", "false"),
        ("HYBRID_SHARD_ZERO2", "false"),
    ],
)
def test_strategies(strategy: str, reshards: str, tmp_path: Path) -> None:
    text, _ = converted(tmp_path, "a.yaml", FSDP.replace("STRATEGY", strategy))
    assert f"fsdp_reshard_after_forward: {reshards} " in text


def test_hybrid_shard_keeps_its_replicas(tmp_path: Path) -> None:
    text, report = converted(tmp_path, "a.yaml", FSDP.replace("STRATEGY", "HYBRID_SHARD"))
    assert "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n" in text
    assert [f.line for f in report.manual] == [7]


@pytest.mark.parametrize("change", [("STRATEGY", "NO_SHARD"), ("'FULL_STATE_DICT'", "LOCAL_STATE_DICT")])
def test_what_would_train_otherwise_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    given = FSDP.replace(*change).replace("STRATEGY", "FULL_SHARD")
    text, report = converted(tmp_path, "a.yaml", given)
    assert text == textwrap.dedent(given) and len(report.manual) == 1


def test_a_deepspeed_config_becomes_fsdp2(tmp_path: Path) -> None:
    text, report = converted(tmp_path, "a.yml", DEEPSPEED)
    assert text.startswith("# eight GPUs\ndistributed_type: FSDP\nfsdp_config:  # stage\n  fsdp_version: 2\n")
    assert "fsdp_offload_params: true\n" in text and "  # where\n" in text and "deepspeed" not in text
    assert not report.manual


def test_the_clipping_that_deepspeed_did_is_left_to_the_script(tmp_path: Path) -> None:
    _, report = converted(tmp_path, "a.yml", DEEPSPEED.replace("      gradient_clipping: 0.0\n", ""))
    assert ["clip_grad_norm_" in f.message for f in report.manual] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("text", [FSDP.replace("STRATEGY", "FULL_SHARD"), DEEPSPEED], ids=["fsdp1", "deepspeed"])
def test_accelerate_reads_the_result_as_fsdp2(text: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    converted(tmp_path, "a.yaml", text)
    config = load_config_from_file(str(tmp_path / "a.yaml"))
    assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_reshard_after_forward"] is True


def test_trainer_arguments_in_json(tmp_path: Path) -> None:
    given = (
        '{\n  "output_dir": "o",\n  "fsdp": "shard_grad_op auto_wrap",\n  "fsdp_config": {"use_orig_params": true}\n}\n'
    )
    text, report = converted(tmp_path, "args.json", given)
    assert '"fsdp": "full_shard auto_wrap"' in text and '"version": 2' in text and "use_orig_params" not in text
    assert '"reshard_after_forward": false' in text and not report.manual


@pytest.mark.parametrize("word", ["no_shard", "hybrid_shard auto_wrap"])
def test_trainer_arguments_that_are_refused(word: str, tmp_path: Path) -> None:
    given = f'{{"output_dir": "o", "fsdp": "{word}"}}'
    text, report = converted(tmp_path, "args.json", given)
    assert text == given and len(report.manual) == 1


LINES = {
    "deepspeed train.py": "torchrun --nproc_per_node=gpu train.py",
    "deepspeed --num_gpus 4 --num_nodes=2 train.py --lr 1": "torchrun --nproc_per_node=4 --nnodes=2 train.py --lr 1",
    "deepspeed --include localhost:0,3 a/b.py --deepspeed d.json -x": (
        "CUDA_VISIBLE_DEVICES=0,3 torchrun --nproc_per_node=2 a/b.py -x"
    ),
    "X=1 deepspeed train.py \\\n  --deepspeed --deepspeed_config d.json \\\n  --n 3": (
        "X=1 torchrun --nproc_per_node=gpu train.py --n 3"
    ),
}


@pytest.mark.parametrize("suffix", [".sh", ".md"])
@pytest.mark.parametrize(("line", "suggestion"), LINES.items())
def test_launch_lines_are_suggested(line: str, suggestion: str, suffix: str, tmp_path: Path) -> None:
    given = f"# start it\n{line}\n"
    text, report = converted(tmp_path, f"run{suffix}", given)
    assert text == given
    assert [(f.line, f.message.partition(": ")[2]) for f in report.manual] == [(2, suggestion)]


def test_files_of_other_kinds_are_left(tmp_path: Path) -> None:
    others = {"a.yaml": "fsdp: true\n", "b.json": '{"fsdp": 1}', "c.md": "We compare with deepspeed.\n", "d.sh": "ls\n"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    report = migrate.run([tmp_path])
    assert not report.outcomes and not report.findings


@pytest.mark.parametrize(
    "unused", ["fsdp_config: {}\n", "fsdp_config:\n  fsdp_sharding_strategy: 1\n  fsdp_offload_params: false\n"]
)
def test_an_unused_section_does_not_stay_beside_the_new_one(unused: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(f"deepspeed_config:\n  zero_stage: 3\ndistributed_type: DEEPSPEED\n{unused}num_processes: 2\n")
    report = migrate.run([path], write=True)
    text = path.read_text()
    assert report.changed and text.count("fsdp_config:") == 1 and "fsdp_version: 2" in text and "{}" not in text
    assert "sharding_strategy" not in text and text.endswith("num_processes: 2\n")
    assert not migrate.run([path]).changed


@pytest.mark.parametrize(
    ("line", "trainers"),
    [
        ("torchrun train.py --fsdp --fsdp-amp", False),
        ("torchrun train.py --fsdp yes", False),
        ("torchrun train.py --fsdp my_mode", False),
        ("torchrun train.py --fsdp true --output_dir out", True),
        ('torchrun train.py --fsdp "full_shard auto_wrap"', True),
    ],
)
def test_a_flag_of_that_name_need_not_be_the_trainers(line: str, trainers: bool, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(line + "\n")
    assert bool(migrate.run([tmp_path]).changed) is trainers
