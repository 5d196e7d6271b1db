"""accelerate's YAML configs with FSDP1 or DeepSpeed become FSDP2 configs; comments and order stay.

What: `fsdp_version: 2`, `fsdp_reshard_after_forward` in the place of the sharding strategy, arguments that FSDP2 does
not have are removed. HYBRID_SHARD becomes FSDP2 with a `parallelism_config` of replicas and shards. A DeepSpeed config
becomes an FSDP2 config of the same stage.

Why: accelerate's own `to-fsdp2` drops comments, makes NO_SHARD (which is DDP) start to shard, and forgets the replicas
of HYBRID_SHARD.

Before::

    fsdp_config:
      fsdp_sharding_strategy: SHARD_GRAD_OP
      fsdp_use_orig_params: true

After::

    fsdp_config:
      fsdp_version: 2
      fsdp_reshard_after_forward: false

In numbers: equal. DeepSpeed clips by itself: under FSDP the script must call `accelerator.clip_grad_norm_`.

Known limits: NO_SHARD is refused (use `distributed_type: MULTI_GPU`), so is LOCAL_STATE_DICT (it has no counterpart;
convert such checkpoints with `ckptkit convert`), a `deepspeed_config_file`, and offload to NVMe. Read in accelerate
1.15 commands/to_fsdp2.py and commands/config/cluster.py.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from ..grade import Grade
from ..trainer_settings import GONE, LOCAL, RESHARDS, SAME_WEIGHTS, strategy_of
from ..yaml_lines import Lines, Tree, line_of, plain, read
from . import ConfigFile

SOURCES = ("fsdp1", "deepspeed")
SUFFIXES = (".yaml", ".yml")


def claims(text: str) -> bool:
    """Whether a text is an accelerate config of FSDP or DeepSpeed."""
    return "distributed_type:" in text and ("fsdp_config:" in text or "deepspeed_config:" in text)


def convert(file: ConfigFile) -> str:
    """The new text; the old one where the config is refused."""
    tree = read(file)
    if tree is None:
        return file.text
    kind = str(tree.get("distributed_type", "")).rpartition(".")[2].upper()
    section = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(kind, "")
    if not section or not isinstance(tree.get(section), MutableMapping) or not tree[section]:
        return file.text
    if line_of(tree[section], next(iter(tree[section]))) <= line_of(tree, section):
        file.note(Grade.MANUAL, f"write {section} as a block, one key a line, and migrate again", at=section)
        return file.text
    edits = Lines.of(file.text)
    changed = (_from_fsdp1 if kind == "FSDP" else _from_deepspeed)(file, tree, edits)
    return edits.text() if changed else file.text


def _from_fsdp1(file: ConfigFile, tree: Tree, edits: Lines) -> bool:
    config: Tree = tree["fsdp_config"]
    if str(config.get("fsdp_version", 1)) == "2":
        return False
    if str(config.get("fsdp_state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        file.note(Grade.MANUAL, LOCAL, at="LOCAL_STATE_DICT")
        return False
    key = "fsdp_sharding_strategy" if "fsdp_sharding_strategy" in config else "fsdp_reshard_after_forward"
    given = config.get(key, "FULL_SHARD")
    strategy = strategy_of(given)
    if strategy == "NO_SHARD":
        file.note(Grade.MANUAL, "NO_SHARD is DDP: set distributed_type: MULTI_GPU; FSDP2 would start to shard", at=key)
        return False
    if strategy not in RESHARDS:
        file.note(Grade.MANUAL, f"the sharding strategy {given} is not known", at=key)
        return False
    if strategy.startswith("HYBRID") and not _replicate(file, tree, edits):
        return False
    first = line_of(config, next(iter(config)))
    indent, reshards = edits.indent(first), RESHARDS[strategy]
    if "fsdp_version" in config:
        edits.put(line_of(config, "fsdp_version"), "fsdp_version", 2)
    else:
        edits.insert(first, indent, {"fsdp_version": 2})
    if key in config:
        edits.put(line_of(config, key), "fsdp_reshard_after_forward", reshards)
    else:
        edits.insert(first, indent, {"fsdp_reshard_after_forward": reshards})
    if key == "fsdp_sharding_strategy" and "fsdp_reshard_after_forward" in config:
        edits.dropped.add(line_of(config, "fsdp_reshard_after_forward"))
    if "fsdp_state_dict_type" not in config:  # accelerate's default is another one under FSDP2
        edits.insert(first, indent, {"fsdp_state_dict_type": "FULL_STATE_DICT"})
    for name in [f"fsdp_{name}" for name in GONE if f"fsdp_{name}" in config]:
        value = config[name]
        edits.dropped.add(line_of(config, name))
        other = name in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy") and value != "BACKWARD_PRE"
        other = other or (name == "fsdp_forward_prefetch" and value is True)
        file.note(Grade.PERFORMANCE if other else Grade.EXACT, f"{name} has no counterpart and goes", at=name)
    if "SIZE" in str(config.get("fsdp_auto_wrap_policy", "")).upper():
        message = "accelerate counts the sizes of SIZE_BASED_WRAP otherwise under FSDP2: other groups, same numbers"
        file.note(Grade.PERFORMANCE, message, at="fsdp_auto_wrap_policy")
    if str(config.get("fsdp_cpu_ram_efficient_loading", True)).lower() == "false":
        file.note(Grade.EXACT, SAME_WEIGHTS, at="fsdp_cpu_ram_efficient_loading")
    file.note(Grade.EXACT, f"FSDP2; {strategy} becomes fsdp_reshard_after_forward: {plain(reshards)}", at=key)
    return True


def _replicate(file: ConfigFile, tree: Tree, edits: Lines) -> bool:
    """Replicas for the nodes of a hybrid strategy: FSDP1 shards within a node and replicates across nodes."""
    machines, processes = tree.get("num_machines"), tree.get("num_processes")
    if not isinstance(machines, int) or not isinstance(processes, int) or machines < 1 or processes % machines:
        message = "HYBRID_SHARD needs num_machines and num_processes to tell replicas from shards"
        file.note(Grade.MANUAL, message, at="HYBRID_SHARD")
        return False
    if machines == 1:
        file.note(Grade.EXACT, "HYBRID_SHARD on one machine is FULL_SHARD", at="HYBRID_SHARD")
        return True
    if tree.get("parallelism_config"):
        file.note(Grade.MANUAL, "HYBRID_SHARD: there is a parallelism_config already", at="parallelism_config")
        return False
    sizes = {"dp_replicate_size": machines, "dp_shard_size": processes // machines, "tp_size": 1, "cp_size": 1}
    end = len(edits.lines)
    edits.inserted.setdefault(end, []).append("parallelism_config:\n")
    edits.insert(end, "  ", {f"parallelism_config_{name}": size for name, size in sizes.items()})
    message = (
        f"HYBRID_SHARD: {machines} replicas of {processes // machines} shards; start with --use_parallelism_config"
    )
    file.note(Grade.MANUAL, message, at="HYBRID_SHARD")
    return True


def _from_deepspeed(file: ConfigFile, tree: Tree, edits: Lines) -> bool:
    config: Tree = tree["deepspeed_config"]
    reasons = []
    if config.get("deepspeed_config_file"):
        reasons.append(f"the settings are in {config['deepspeed_config_file']}: write them into this file first")
    for part in ("optimizer", "param"):
        device = str(config.get(f"offload_{part}_device", "none"))
        if device not in ("none", "cpu"):
            reasons.append(f"offload of the {part} to {device} has no counterpart")
    stage = config.get("zero_stage", 2)
    if stage not in (1, 2, 3):
        reasons.append(f"ZeRO stage {stage} is DDP: set distributed_type: MULTI_GPU")
    for reason in reasons:
        file.note(Grade.MANUAL, reason, at="deepspeed_config")
    if reasons:
        return False
    offload = [str(config.get(f"offload_{part}_device", "none")) == "cpu" for part in ("optimizer", "param")]
    first = line_of(config, next(iter(config)))
    edits.insert(
        first,
        edits.indent(first),
        {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": any(offload),
            "fsdp_state_dict_type": "FULL_STATE_DICT" if config.get("zero3_save_16bit_model") else "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": bool(config.get("zero3_init_flag", False)),
        },
    )
    edits.dropped |= {line_of(config, key) for key in config}
    if "fsdp_config" in tree:  # `accelerate config` writes the sections that it does not use, too, as `{}`
        unused = tree["fsdp_config"]
        edits.dropped |= {line_of(unused, key) for key in unused or ()} | {line_of(tree, "fsdp_config")}
    edits.put(line_of(tree, "deepspeed_config"), "fsdp_config")
    edits.put(line_of(tree, "distributed_type"), "distributed_type", "FSDP")
    file.note(Grade.EXACT, f"ZeRO stage {stage} becomes FSDP2", at="deepspeed_config")
    if any(offload) and not all(offload):
        file.note(Grade.PERFORMANCE, "FSDP2 offloads parameters and optimizer or neither", at="offload_")
    clip, steps = config.get("gradient_clipping"), config.get("gradient_accumulation_steps", 1)
    limit = 1.0 if clip is None else clip
    if limit:
        message = f"DeepSpeed clipped at {limit} by itself: the script must call accelerator.clip_grad_norm_ with it"
        file.note(Grade.MANUAL, message, at="deepspeed_config" if clip is None else "gradient_clipping")
    if steps not in (1, None):
        message = f"gradient_accumulation_steps: give Accelerator(gradient_accumulation_steps={steps}) in the script"
        file.note(Grade.MANUAL, message, at="gradient_accumulation_steps")
    return True
