"""The later stages of scripts/articles/a.py, made as its reader makes them: imports and another FSDP call."""

from __future__ import annotations

from pathlib import Path

ARTICLES = Path(__file__).parent / "scripts" / "articles"
PLAIN = "    fsdp_model = FSDP(model)\n"
IMPORTED = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
IMPORTS = """\
from functools import partial
from torch.distributed.fsdp.api import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
"""
BEFORE = """\
    my_auto_wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    mixed_precision_policy = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
"""
WRAP, DEVICE = "auto_wrap_policy=my_auto_wrap_policy", "device_id=torch.cuda.current_device()"
MIXED = "mixed_precision=mixed_precision_policy"
CALLS = {
    "wrap_policy": (WRAP, DEVICE),
    "mixed_precision": (WRAP, MIXED, DEVICE),
    "cpu_offload": (WRAP, MIXED, "cpu_offload=CPUOffload(offload_params=True)", DEVICE),
    "full_shard": (WRAP, MIXED, "sharding_strategy=ShardingStrategy.FULL_SHARD", DEVICE),
    "shard_grad_op": (WRAP, "sharding_strategy=ShardingStrategy.SHARD_GRAD_OP", DEVICE),
    "hybrid_shard": (WRAP, "sharding_strategy=ShardingStrategy.HYBRID_SHARD", DEVICE),
    "no_shard": (WRAP, "sharding_strategy=ShardingStrategy.NO_SHARD", DEVICE),
}
# Saved by rank 0 and loaded back before the loop, so that the weights that train went through the file. Every rank
# loads it: a load_state_dict(None) on the others, as some texts have it, is a TypeError.
CHECKPOINT = """\
    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(fsdp_model, StateDictType.FULL_STATE_DICT, save_policy):
        cpu_state = fsdp_model.state_dict()
    if rank == 0:
        torch.save(cpu_state, "my_checkpoint.pt")
    dist.barrier()
    load_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    with FSDP.state_dict_type(fsdp_model, StateDictType.FULL_STATE_DICT, load_policy):
        cpu_state = torch.load("my_checkpoint.pt")
        fsdp_model.load_state_dict(cpu_state)
"""
STAGES = ("basic", *CALLS, "checkpoint")
# What the texts show and torch refuses: rank 0 alone loads, a policy is called, a dtype is no MixedPrecision.
TOLD = {
    "a_checkpoint": (
        ("rank0_only=False)", "rank0_only=True)"),
        (
            '        cpu_state = torch.load("my_checkpoint.pt")\n',
            '        if rank == 0:\n            cpu_state = torch.load("my_checkpoint.pt")\n'
            "        else:\n            cpu_state = None\n",
        ),
    ),
    "size_based": (
        (
            "partial(size_based_auto_wrap_policy, min_num_params=1000)",
            "size_based_auto_wrap_policy(min_num_params=1000)",
        ),
        ("mixed_precision=MixedPrecision(param_dtype=torch.float16)", "mixed_precision=torch.float16"),
    ),
}
# What the texts say about DDP in a sentence each: the size of its buckets, parameters that a step may not use.
TUNED = (("device_ids=[local_rank]", "device_ids=[local_rank], bucket_cap_mb=50, find_unused_parameters=True"),)


def changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    """A script with all of some changes."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def stage(name: str) -> str:
    """The script of a stage, whole."""
    text = (ARTICLES / "a.py").read_text(encoding="utf-8")
    assert PLAIN in text and IMPORTED in text
    if name == "basic":
        return text
    call = "".join(f"        {argument},\n" for argument in CALLS.get(name, CALLS["wrap_policy"]))
    wrapped = f"{BEFORE}    fsdp_model = FSDP(\n        model,\n{call}    )\n"
    if name == "checkpoint":
        wrapped += CHECKPOINT
    return text.replace(IMPORTED, IMPORTED + IMPORTS).replace(PLAIN, wrapped)
