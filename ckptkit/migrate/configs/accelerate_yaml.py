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

import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Lines:
    """Edits of whole lines, so that everything else stays byte for byte. Keys count their lines from 0."""

    lines: list[str]
    dropped: set[int] = field(default_factory=set)
    inserted: dict[int, list[str]] = field(default_factory=dict)  # before which line

    def indent(self, at: int) -> str:
        return re.match(r"\s*", self.lines[at]).group()  # type: ignore[union-attr]

    def put(self, at: int, key: str, value: object = None) -> None:
        """Give a line another key, and another value, if one is given; its comment stays."""
        found = re.match(r"(\s*)[\w-]+(\s*:\s*)([^\s#]*)(.*)", self.lines[at], re.DOTALL)
        assert found is not None
        indent, colon, old, rest = found.groups()
        self.lines[at] = f"{indent}{key}{colon}{old if value is None else _plain(value)}{rest}"

    def insert(self, at: int, indent: str, entries: dict[str, object]) -> None:
        """Insert entries before a line."""
        self.inserted.setdefault(at, []).extend(f"{indent}{k}: {_plain(v)}\n" for k, v in entries.items())

    def text(self) -> str:
        out: list[str] = []
        for index, line in enumerate([*self.lines, ""]):
            out += self.inserted.get(index, [])
            if index not in self.dropped:
                out.append(line)
        return "".join(out)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def convert(file: ConfigFile) -> str:
    """The new text; the old one where the config is refused."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        tree = YAML().load(file.text)
    except YAMLError as error:
        file.note(Grade.MANUAL, f"cannot be read: {' '.join(str(error).split())[:120]}")
        return file.text
    if not isinstance(tree, MutableMapping):
        return file.text
    kind = str(tree.get("distributed_type", "")).rpartition(".")[2].upper()
    section = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(kind, "")
    if not section or not isinstance(tree.get(section), MutableMapping) or not tree[section]:
        return file.text
    if _line(tree[section], next(iter(tree[section]))) <= _line(tree, section):
        file.note(Grade.MANUAL, f"write {section} as a block, one key a line, and migrate again", at=section)
        return file.text
    edits = _Lines(file.text.splitlines(keepends=True))
    if edits.lines and not edits.lines[-1].endswith("\n"):
        edits.lines[-1] += "\n"
    changed = (_from_fsdp1 if kind == "FSDP" else _from_deepspeed)(file, tree, edits)
    return edits.text() if changed else file.text


def _line(tree: Tree, key: str) -> int:
    return int(tree.lc.key(key)[0])  # type: ignore[attr-defined]


def _from_fsdp1(file: ConfigFile, tree: Tree, edits: _Lines) -> bool:
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
    strategy = str(given).upper()
    if isinstance(given, bool):
        strategy = "FULL_SHARD" if given else "SHARD_GRAD_OP"
    elif strategy.isdigit():
        strategy = _STRATEGIES.get(int(strategy), strategy)
    if strategy == "NO_SHARD":
        file.note(Grade.MANUAL, "NO_SHARD is DDP: set distributed_type: MULTI_GPU; FSDP2 would start to shard", at=key)
        return False
    if strategy not in _RESHARDS:
        file.note(Grade.MANUAL, f"the sharding strategy {given} is not known", at=key)
        return False
    if strategy.startswith("HYBRID") and not _replicate(file, tree, edits):
        return False
    first = _line(config, next(iter(config)))
    indent, reshards = edits.indent(first), _RESHARDS[strategy]
    if "fsdp_version" in config:
        edits.put(_line(config, "fsdp_version"), "fsdp_version", 2)
    else:
        edits.insert(first, indent, {"fsdp_version": 2})
    if key in config:
        edits.put(_line(config, key), "fsdp_reshard_after_forward", reshards)
    else:
        edits.insert(first, indent, {"fsdp_reshard_after_forward": reshards})
    if key == "fsdp_sharding_strategy" and "fsdp_reshard_after_forward" in config:
        edits.dropped.add(_line(config, "fsdp_reshard_after_forward"))
    for name in [name for name in _GONE if name in config]:
        value = config[name]
        edits.dropped.add(_line(config, name))
        other = name in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy") and value != "BACKWARD_PRE"
        other = other or (name == "fsdp_forward_prefetch" and value is True)
        file.note(Grade.PERFORMANCE if other else Grade.EXACT, f"{name} has no counterpart and goes", at=name)
    if "SIZE" in str(config.get("fsdp_auto_wrap_policy", "")).upper():
        message = "accelerate counts the sizes of SIZE_BASED_WRAP otherwise under FSDP2: other groups, same numbers"
        file.note(Grade.PERFORMANCE, message, at="fsdp_auto_wrap_policy")
    file.note(Grade.EXACT, f"FSDP2; {strategy} becomes fsdp_reshard_after_forward: {_plain(reshards)}", at=key)
    return True


def _replicate(file: ConfigFile, tree: Tree, edits: _Lines) -> bool:
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


def _from_deepspeed(file: ConfigFile, tree: Tree, edits: _Lines) -> bool:
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
    first = _line(config, next(iter(config)))
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
    edits.dropped |= {_line(config, key) for key in config}
    edits.put(_line(tree, "deepspeed_config"), "fsdp_config")
    edits.put(_line(tree, "distributed_type"), "distributed_type", "FSDP")
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
