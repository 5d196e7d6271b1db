"""The ZeRO stage and the offload of a DeepSpeed config become arguments of fully_shard.

What: stage 3 is FSDP2's default; stages 0, 1 and 2 become `reshard_after_forward=False`; `zero_hpz_partition_size` is
`reshard_after_forward=k`; `offload_optimizer` and `offload_param` on the CPU become `CPUOffloadPolicy()`.

Why: stage 3 frees parameters after their use, stages 0 to 2 keep them.

Before::

    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}

After::

    fully_shard(model, reshard_after_forward=False, offload_policy=CPUOffloadPolicy())

In numbers: equal.

Known limits: FSDP2 shards parameters, gradients and optimizer states always: a replicated stage (0, 1) needs less
memory and other communication. FSDP2 offloads all or nothing: parameters go with the optimizer. Bucket sizes, overlap
and partitioning switches have no meaning for FSDP2.
"""

from __future__ import annotations

from ..draft import Draft
from ..ds_config import Unknown, entry
from ..ds_setup import constant, setup_of
from ..grade import Grade
from ..wraps import Wrap

SOURCES = ("deepspeed",)
_ZERO = "zero_optimization"
_KNOWN = frozenset(
    "stage offload_optimizer offload_param zero_hpz_partition_size zenflow mics_shard_size zero_quantized_weights "
    "zero_quantized_gradients".split()
)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add the arguments to the plan."""
    setup = setup_of(draft, wrap)
    if isinstance(setup, Unknown):
        return
    size = entry(setup.tree, f"{_ZERO}.zero_hpz_partition_size", 1)
    if setup.stage < 3:
        wrap.plan.kwargs["reshard_after_forward"] = ("False",)
        grade = Grade.EXACT if setup.stage == 2 else Grade.PERFORMANCE
        draft.note(wrap.call, grade, f"ZeRO stage {setup.stage}: parameters stay gathered between forward and backward")
    elif size not in (0, 1) and constant(size):
        wrap.plan.kwargs["reshard_after_forward"] = (repr(size),)
        draft.note(wrap.call, Grade.EXACT, f"zero_hpz_partition_size becomes reshard_after_forward={size}")
    else:
        draft.note(wrap.call, Grade.EXACT, "ZeRO stage 3: parameters are freed after their use, as FSDP2 does")
    devices = {part: entry(setup.tree, f"{_ZERO}.offload_{part}.device") for part in ("param", "optimizer")}
    if "cpu" in devices.values():
        policy = draft.need("torch.distributed.fsdp", "CPUOffloadPolicy")
        pinned = any(entry(setup.tree, f"{_ZERO}.offload_{part}.pin_memory", False) is True for part in devices)
        wrap.plan.kwargs["offload_policy"] = (f"{policy}({'' if pinned else 'pin_memory=False'})",)
        whole = all(device == "cpu" for device in devices.values())
        message = "offload_policy moves parameters, gradients and optimizer states to the CPU"
        if not whole:
            message += "; DeepSpeed moved only a part: FSDP2 offloads all or nothing"
        draft.note(wrap.call, Grade.EXACT if whole else Grade.PERFORMANCE, message)
    rest = sorted(set(entry(setup.tree, _ZERO, {})) - _KNOWN)
    if rest:
        draft.note(wrap.call, Grade.PERFORMANCE, f"without meaning for FSDP2: {', '.join(rest)}")
