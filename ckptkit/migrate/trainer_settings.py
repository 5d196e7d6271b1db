"""Fact: transformers' FSDP settings (`TrainingArguments.fsdp`, `fsdp_config`) in the words of FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GONE = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")


def to_fsdp2(fsdp: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]] | str:
    """(fsdp, fsdp_config, names that go), or why the settings have no counterpart.

    transformers reads `fsdp_config["version"]` since 4.50; `fsdp` must stay a word list for the versions before 5
    (training_args.py `_process_fsdp_args`). Prefixes `fsdp_` of the keys are optional.
    """
    words = fsdp.split()
    plain = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    if "no_shard" in words:
        return "no_shard is DDP: leave fsdp out; FSDP2 would start to shard"
    if any(word.startswith("hybrid_shard") for word in words):
        return "hybrid_shard: give TrainingArguments a parallelism_config of replicas and shards"
    if str(plain.get("state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        return "LOCAL_STATE_DICT has no counterpart: choose SHARDED_STATE_DICT, convert old files with ckptkit convert"
    reshard = "shard_grad_op" not in words
    given = plain.get("reshard_after_forward")
    if isinstance(given, bool):
        reshard = given
    gone = [key for key in config if key.removeprefix("fsdp_") in _GONE]
    kept = {key: value for key, value in config.items() if key not in gone}
    for key in [k for k in kept if k.removeprefix("fsdp_") in ("version", "reshard_after_forward")]:
        kept.pop(key)
    new = " ".join("full_shard" if word == "shard_grad_op" else word for word in words)
    return new, {"version": 2, "reshard_after_forward": reshard, **kept}, gone
