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

import io
from collections.abc import MutableMapping
from typing import Any

from ..grade import Grade
from . import ConfigFile

SOURCES = ("fsdp1", "deepspeed")
SUFFIXES = (".yaml", ".yml")

Tree = MutableMapping[str, Any]
_STRATEGIES = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_GONE = (
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
    "fsdp_backward_prefetch",
    "fsdp_backward_prefetch_policy",
    "fsdp_forward_prefetch",
    "fsdp_limit_all_gathers",
)


def claims(text: str) -> bool:
    """Whether a text is an accelerate config of FSDP or DeepSpeed."""
    return "distributed_type:" in text and ("fsdp_config:" in text or "deepspeed_config:" in text)


def convert(file: ConfigFile) -> str:
    """The new text; the old one where the config is refused."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    try:
        tree = yaml.load(file.text)
    except YAMLError as error:
        file.note(Grade.MANUAL, f"cannot be read: {' '.join(str(error).split())[:120]}")
        return file.text
    if not isinstance(tree, MutableMapping):
        return file.text
    kind = str(tree.get("distributed_type", "")).rpartition(".")[2].upper()
    if kind == "FSDP" and tree.get("fsdp_config"):
        changed = _from_fsdp1(file, tree)
    elif kind == "DEEPSPEED" and tree.get("deepspeed_config"):
        changed = _from_deepspeed(file, tree)
    else:
        changed = False
    if not changed:
        return file.text
    out = io.StringIO()
    yaml.dump(tree, out)
    return out.getvalue()


def _from_fsdp1(file: ConfigFile, tree: Tree) -> bool:
    config: Tree = tree["fsdp_config"]
    if str(config.get("fsdp_version", 1)) == "2":
        return False
    if str(config.get("fsdp_state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        message = (
            "LOCAL_STATE_DICT has no counterpart: choose SHARDED_STATE_DICT, convert old files with ckptkit convert"
        )
        file.note(Grade.MANUAL, message, at="LOCAL_STATE_DICT")
        return False
    key = "fsdp_sharding_strategy" if "fsdp_sharding_strategy" in config else "fsdp_reshard_after_forward"
    given = config.get(key, "FULL_SHARD")
    strategy = _STRATEGIES.get(int(given), "") if str(given).isdigit() and str(given) != "" else str(given).upper()
    if strategy == "NO_SHARD":
        message = "NO_SHARD is DDP: set distributed_type: MULTI_GPU; FSDP2 would start to shard"
        file.note(Grade.MANUAL, message, at=key)
        return False
    if isinstance(given, bool):
        strategy = "FULL_SHARD" if given else "SHARD_GRAD_OP"
    if strategy not in _RESHARDS:
        file.note(Grade.MANUAL, f"the sharding strategy {given} is not known", at=key)
        return False
    if strategy.startswith("HYBRID") and not _replicate(file, tree):
        return False
    _renamed(config, key, "fsdp_reshard_after_forward", _RESHARDS[strategy])
    for name in [name for name in _GONE if name in config]:
        value = config.pop(name)
        other = name in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy") and value != "BACKWARD_PRE"
        other = other or (name == "fsdp_forward_prefetch" and value is True)
        file.note(Grade.PERFORMANCE if other else Grade.EXACT, f"{name} has no counterpart and goes", at=name)
    if "SIZE" in str(config.get("fsdp_auto_wrap_policy", "")).upper():
        message = "accelerate counts the sizes of SIZE_BASED_WRAP otherwise under FSDP2: other groups, same numbers"
        file.note(Grade.PERFORMANCE, message, at="fsdp_auto_wrap_policy")
    if "fsdp_version" in config:
        config["fsdp_version"] = 2
    else:
        config.insert(0, "fsdp_version", 2)  # type: ignore[attr-defined]
    file.note(Grade.EXACT, f"FSDP2; {strategy} becomes fsdp_reshard_after_forward: {_RESHARDS[strategy]}", at=key)
    return True


def _replicate(file: ConfigFile, tree: Tree) -> bool:
    """Replicas for the nodes of a hybrid strategy: FSDP1 shards within a node and replicates across nodes."""
    machines, processes = tree.get("num_machines"), tree.get("num_processes")
    if not isinstance(machines, int) or not isinstance(processes, int) or machines < 1 or processes % machines:
        message = "HYBRID_SHARD needs num_machines and num_processes to tell replicas from shards"
        file.note(Grade.MANUAL, message, at="HYBRID_SHARD")
        return False
    if machines == 1:
        file.note(Grade.EXACT, "HYBRID_SHARD on one machine is FULL_SHARD", at="HYBRID_SHARD")
        return True
    tree["parallelism_config"] = {
        "parallelism_config_dp_replicate_size": machines,
        "parallelism_config_dp_shard_size": processes // machines,
        "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": 1,
    }
    message = (
        f"HYBRID_SHARD: {machines} replicas of {processes // machines} shards; start with --use_parallelism_config"
    )
    file.note(Grade.MANUAL, message, at="HYBRID_SHARD")
    return True


def _renamed(config: Tree, old: str, new: str, value: object) -> None:
    """Put a value under a new key in the place of an old one, its comment with it."""
    if old == new or old not in config:
        config[new] = value
        return
    position = list(config).index(old)
    comment = config.ca.items.pop(old, None)  # type: ignore[attr-defined]
    config.pop(old)
    config.pop(new, None)
    config.insert(position, new, value)  # type: ignore[attr-defined]
    if comment is not None:
        config.ca.items[new] = comment  # type: ignore[attr-defined]


def _from_deepspeed(file: ConfigFile, tree: Tree) -> bool:
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
    new: dict[str, object] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": any(offload),
        "fsdp_state_dict_type": "FULL_STATE_DICT" if config.get("zero3_save_16bit_model") else "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": bool(config.get("zero3_init_flag", False)),
    }
    clip, steps = config.get("gradient_clipping"), config.get("gradient_accumulation_steps", 1)
    position = list(tree).index("deepspeed_config")
    comment = tree.ca.items.pop("deepspeed_config", None)  # type: ignore[attr-defined]
    tree.pop("deepspeed_config")
    tree.insert(position, "fsdp_config", new)  # type: ignore[attr-defined]
    if comment is not None:
        tree.ca.items["fsdp_config"] = comment  # type: ignore[attr-defined]
    tree["distributed_type"] = "FSDP"
    file.note(Grade.EXACT, f"ZeRO stage {stage} becomes FSDP2", at="deepspeed_config")
    if any(offload) and not all(offload):
        file.note(Grade.PERFORMANCE, "FSDP2 offloads parameters and optimizer or neither", at="offload_")
    limit = 1.0 if clip is None else clip
    if limit:
        message = f"DeepSpeed clipped at {limit} by itself: the script must call accelerator.clip_grad_norm_ with it"
        file.note(Grade.MANUAL, message, at="gradient_clipping")
    if steps not in (1, None):
        message = f"gradient_accumulation_steps: give Accelerator(gradient_accumulation_steps={steps}) in the script"
        file.note(Grade.MANUAL, message, at="gradient_accumulation_steps")
    return True
