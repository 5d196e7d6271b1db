"""What FSDP2 has no counterpart for keeps its DeepSpeed engine, with one finding each.

What: configs that cannot be read here, and pipeline parallelism, mixture of experts, tensor and sequence parallelism,
NVMe offload, compressed (1-bit) and layer-wise optimizers, sparse gradients, curricula, data efficiency, compression,
autotuning, elasticity, the hybrid engine, ZenFlow, MiCS, Apex AMP, and gradients that are summed or divided otherwise.
The call and all uses of its engine stay as they are.

Why: each changes what is computed or where, in ways that `fully_shard` does not do.

Before and after: equal, with a TODO that names each reason.

In numbers: nothing changes.

A config's monitors (tensorboard, wandb, comet, csv_monitor) are left with a TODO: the engine wrote its metrics there.
Keys that tune DeepSpeed's own printing, profiling and kernels are named as without meaning.

Known limits: keys that neither DeepSpeed 0.19.8 nor this page knows are left with a TODO as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst

from ..draft import Draft
from ..ds_config import Tree, Unknown, entry
from ..ds_setup import constant, setup_of
from ..grade import Grade
from ..schedules import PORTS
from ..wraps import Wrap

SOURCES = ("deepspeed",)

_SECTIONS = {
    "pipeline": "pipeline parallelism has no counterpart here: see torch.distributed.pipelining",
    "tensor_parallel": "tensor parallelism: use torch.distributed.tensor.parallel before fully_shard",
    "sequence_parallel_size": "sequence parallelism has no counterpart here",
    "sparse_attention": "sparse attention kernels are DeepSpeed's own",
    "sparse_gradients": "sparse gradients have no counterpart",
    "curriculum_learning": "the curriculum is DeepSpeed's own",
    "data_efficiency": "data efficiency (curricula, random layer drop) is DeepSpeed's own",
    "compression_training": "compression is DeepSpeed's own",
    "autotuning": "autotuning is DeepSpeed's own: migrate the config that it found",
    "elasticity": "elastic batch sizes are DeepSpeed's own: give train_batch_size",
    "hybrid_engine": "the hybrid engine has no counterpart",
    "progressive_layer_drop": "progressive layer drop is DeepSpeed's own",
    "eigenvalue": "eigenvalue computation is DeepSpeed's own",
    "quantize_training": "quantized training is DeepSpeed's own",
    "amp": "Apex AMP has no counterpart: use bf16",
    "torch_autocast": "torch_autocast: put torch.autocast around the forward by hand",
    "prescale_gradients": "gradients are divided before the reduction: set_gradient_divide_factor",
    "gradient_predivide_factor": "gradients are divided before the reduction: set_gradient_divide_factor",
    "expert_parallel": "expert parallelism has no counterpart here",
    "zero_optimization.zenflow": "ZenFlow is DeepSpeed's own",
    "zero_optimization.mics_shard_size": "MiCS: build a 2-D mesh of replicas and shards",
    "zero_optimization.zero_quantized_weights": "quantized weights (ZeRO++) are DeepSpeed's own",
    "zero_optimization.zero_quantized_gradients": "quantized gradients (ZeRO++) are DeepSpeed's own",
}
_OPTIMIZERS = ("adam", "adamw", "adagrad")
_READ = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler fp16 bf16 "
    "bfloat16 data_types communication_data_type gradient_clipping zero_optimization dataloader_drop_last "
    "managed_gradient_accumulation".split()
)
_MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
_IDLE = frozenset(  # deepspeed 0.19.8 runtime/config.py: printing, profiling, kernels, storage of its own files
    "steps_per_print wall_clock_breakdown memory_breakdown dump_state comms_logger flops_profiler aio checkpoint "
    "nebula activation_checkpointing zero_allow_untested_optimizer zero_force_ds_cpu_optimizer compile "
    "disable_allgather use_data_before_expert_parallelism data_parallel_size use_node_local_storage "
    "load_universal_checkpoint graph_harvesting timers monitor_config weight_quantization "
    "checkpoint_parallel_write_pipeline".split()
)
_ARGUMENTS = {
    "mpu": "a model parallelism unit: build the mesh with init_device_mesh",
    "mesh_param": "a mesh of data and sequence parallelism: build it with init_device_mesh",
}
_MODELS = {
    "deepspeed.pipe.PipelineModule": "pipeline parallelism has no counterpart here: see torch.distributed.pipelining",
    "deepspeed.moe.layer.MoE": "mixture of experts (expert parallelism) has no counterpart here",
}


def plan(draft: Draft, wrap: Wrap) -> None:
    """Refuse what stays."""
    for name in ("distributed_port", "dist_init_required", "collate_fn", "training_data", "model_parameters", "args"):
        wrap.get(name)
    for name, reason in _ARGUMENTS.items():
        if wrap.get(name) is not None:
            wrap.plan.refuse("deepspeed-unsupported", reason)
    for module in draft.flow.program:
        for call in module.every(cst.Call):
            reason = _MODELS.get(_public(draft.flow.called(module, call)), "")
            if reason:
                wrap.plan.refuse("deepspeed-unsupported", reason)
    setup = setup_of(draft, wrap)
    if isinstance(setup, Unknown):
        wrap.plan.refuse("deepspeed-unsupported", setup.reason)
        return
    for reason in dict.fromkeys(_reasons(setup.tree)):
        wrap.plan.refuse("deepspeed-unsupported", reason)
    if not wrap.plan.refused:
        _left(draft, wrap, setup.tree)


def _left(draft: Draft, wrap: Wrap, tree: Tree) -> None:
    """Say what a config holds besides what is carried over."""
    sections = {path.partition(".")[0] for path in _SECTIONS}
    idle, unknown = [], []
    for key in tree:
        if key in _MONITORS and _is_on(tree[key]):
            draft.todo(wrap.call, f"{key}: DeepSpeed's engine wrote its metrics there; log them in the training loop")
        elif key in _IDLE or key in _MONITORS:
            idle.append(key)
        elif key not in _READ and key not in sections:
            unknown.append(key)
    if idle:
        draft.note(wrap.call, Grade.PERFORMANCE, f"without meaning for FSDP2: {', '.join(sorted(idle))}")
    if unknown:
        draft.todo(wrap.call, f"the config's {', '.join(sorted(unknown))}: nothing here knows what this does")


def _public(name: str) -> str:
    last = name.rpartition(".")[2]
    return next((known for known in _MODELS if name.startswith("deepspeed.") and known.endswith("." + last)), name)


def _reasons(tree: Tree) -> list[str]:
    found = [reason for path, reason in _SECTIONS.items() if _is_on(entry(tree, path))]
    for part in ("param", "optimizer"):
        device = entry(tree, f"zero_optimization.offload_{part}.device", "none")
        if device not in ("cpu", "none"):
            found.append(f"offload_{part} to {device if constant(device) else 'what the run says'} has no counterpart")
    kind = entry(tree, "optimizer.type")
    if kind is not None and (not constant(kind) or (kind.lower() not in _OPTIMIZERS and not _of_torch(kind))):
        found.append(f"the optimizer {kind if constant(kind) else ''} is DeepSpeed's own: give one of torch.optim")
    scheduler = entry(tree, "scheduler.type")
    if scheduler is not None and scheduler not in PORTS:
        shown = scheduler if constant(scheduler) else "of the run"
        found.append(f"the scheduler {shown} has no port: give one of torch.optim.lr_scheduler to the call")
    if entry(tree, "managed_gradient_accumulation", True) is False:
        found.append("the program sets the accumulation boundary itself: call the optimizer where it calls step")
    return found


def _of_torch(kind: str) -> bool:
    return kind in ("SGD", "RMSprop", "Adamax", "NAdam", "RAdam", "ASGD", "Adadelta", "Rprop")


def _is_on(value: Any) -> bool:
    """Whether a section is there and not switched off."""
    if isinstance(value, Mapping):
        enabled = value.get("enabled", True)
        sizes = [v for k, v in value.items() if k.endswith("_size")]
        return enabled is not False and not (sizes and all(size in (0, 1) for size in sizes))
    return value not in (None, False, 0, 1, 1.0, -1)
