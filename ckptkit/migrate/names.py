"""Canonical names of the APIs that are migrated, whatever private module or re-export they were imported from."""

from __future__ import annotations

FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
DDP = "torch.nn.parallel.DistributedDataParallel"
DEEPSPEED = "deepspeed.initialize"
CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"

# Call name -> (source, parameter names in positional order). torch 2.13 `FullyShardedDataParallel.__init__`,
# `DistributedDataParallel.__init__`; deepspeed 0.19.8 `initialize`.
WRAPPERS: dict[str, tuple[str, tuple[str, ...]]] = {
    FSDP: (
        "fsdp1",
        (
            "module",
            "process_group",
            "sharding_strategy",
            "cpu_offload",
            "auto_wrap_policy",
            "backward_prefetch",
            "mixed_precision",
            "ignored_modules",
            "param_init_fn",
            "device_id",
            "sync_module_states",
            "forward_prefetch",
            "limit_all_gathers",
            "use_orig_params",
            "ignored_states",
            "device_mesh",
        ),
    ),
    DDP: (
        "ddp",
        (
            "module",
            "device_ids",
            "output_device",
            "dim",
            "broadcast_buffers",
            "init_sync",
            "process_group",
            "bucket_cap_mb",
            "find_unused_parameters",
            "check_reduction",
            "gradient_as_bucket_view",
            "static_graph",
            "delay_all_reduce_named_params",
            "param_to_hook_all_reduce",
            "mixed_precision",
            "device_mesh",
            "skip_all_reduce_unused_params",
            "bucket_cap_mb_list",
            "batched_grad_copy",
            "forward_sync_buffers",
        ),
    ),
    DEEPSPEED: (
        "deepspeed",
        (
            "args",
            "model",
            "optimizer",
            "model_parameters",
            "training_data",
            "lr_scheduler",
            "distributed_port",
            "mpu",
            "dist_init_required",
            "collate_fn",
            "config",
            "mesh_param",
            "config_params",
        ),
    ),
}

# Text that a file must hold to be worth parsing, per source. Case matters for none of them.
MARKERS: dict[str, tuple[str, ...]] = {
    "fsdp1": (
        "fullyshardeddataparallel",
        "distributed.fsdp",
        "distributed import fsdp",
        "_checkpoint.checkpoint_wrapper",
        "fsdpstrategy",
        # settings of transformers, accelerate and Lightning in calls and dicts
        "fsdp=",
        "fsdp:",
        "fsdp_config",
        '"fsdp',
        "'fsdp",
    ),
    "ddp": ("distributeddataparallel", "nn.parallel"),
    "deepspeed": ("deepspeed",),
}

# Names of `torch.distributed.fsdp` that belong to FSDP2 (torch 2.13 `__all__`); every other one is FSDP1's.
FSDP2_NAMES = frozenset(
    (
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "fully_shard",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "register_fsdp_forward_method",
        "share_comm_ctx",
        "UnshardHandle",
    )
)

# Calls that hand back what they were given, so that a value is the same before and after.
PASS_METHODS = frozenset(
    "to cuda cpu train eval half bfloat16 float double requires_grad_ to_empty apply type xpu npu share_memory".split()
)
PASS_CALLS = frozenset(("torch.compile", "torch.distributed.fsdp.fully_shard", "copy.deepcopy"))


def canonical(name: str) -> str:
    """The public spelling of a dotted name: private modules of torch's FSDP and DDP fold into their packages."""
    parts = name.split(".")
    if name.startswith("torch.distributed.fsdp.") and len(parts) > 4:
        # `torch.distributed.fsdp.api.X`, `.wrap.X`, `.fully_sharded_data_parallel.X.method` all name X itself.
        rest = parts[3:]
        while len(rest) > 1 and rest[0].islower():
            rest = rest[1:]
        return ".".join([*parts[:3], *rest])
    if name.startswith("torch.nn.parallel.distributed."):
        return "torch.nn.parallel." + ".".join(parts[4:])
    if name.startswith("deepspeed.runtime.engine.initialize"):
        return DEEPSPEED
    return name


def is_fsdp1(name: str) -> bool:
    """Whether a canonical name is FSDP1's own API, so that nothing of it may be left over unsaid."""
    prefix = "torch.distributed.fsdp."
    if name == "torch.distributed.fsdp" or not name.startswith(prefix):
        return False
    return name[len(prefix) :].split(".")[0] not in FSDP2_NAMES


def is_ddp(name: str) -> bool:
    """Whether a canonical name is DDP's own API."""
    return name == DDP or name.startswith(DDP + ".")


def is_deepspeed(name: str) -> bool:
    """Whether a canonical name belongs to DeepSpeed."""
    return name == "deepspeed" or name.startswith("deepspeed.")


OWNERS = {"fsdp1": is_fsdp1, "ddp": is_ddp, "deepspeed": is_deepspeed}
