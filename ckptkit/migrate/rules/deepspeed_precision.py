"""bf16 and fp16 of a DeepSpeed config become a MixedPrecisionPolicy over fp32 masters.

What: the weights are rounded to the low precision and kept in fp32, `mp_policy` names the dtypes, and fp16 gets
DeepSpeed's own loss scale as a class that is written into the file (the rule deepspeed-engine uses it): torch's
`GradScaler` has no hysteresis, and skips other updates.

Why: DeepSpeed casts the model to bf16 or fp16 and keeps fp32 masters, which start from the rounded weights. FSDP2
trains in the dtype in which the parameters are; without the rounding the loss is 6.6e-4 off at the second step. The
engine casts no inputs, so the policy does not either.

Before::

    {"bf16": {"enabled": true}}

After::

    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False))

In numbers: bf16 without accumulation is equal. DeepSpeed accumulates micro-batches in bf16 unless
`data_types.grad_accum_dtype` is fp32; FSDP2 adds them in fp32: about 1e-5 at step 3. bf16.check_grad_overflow skips
steps with inf or nan; FSDP2 does not. fp16: the loss scale starts, waits (hysteresis), falls and grows as DeepSpeed's
does, and the same updates are skipped; gradients are reduced in fp16, rounded in another order. Without ZeRO (stage 0)
DeepSpeed 0.19.8 does not multiply the loss by the scale but divides the gradients by it, so that they are tiny, never
overflow and never are clipped; here they are scaled as at the other stages.

Known limits: `fp16.auto_cast` becomes `cast_forward_inputs=True`.
"""

from __future__ import annotations

from ..draft import Draft
from ..ds_config import Unknown, entry
from ..ds_setup import setup_of
from ..grade import Grade
from ..loss_scale import unknown
from ..plan import MODEL, Order
from ..wraps import Wrap

SOURCES = ("deepspeed",)
_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16", "fp16": "float16"}


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add the rounding and the policy to the plan."""
    setup = setup_of(draft, wrap)
    if isinstance(setup, Unknown) or setup.precision == "fp32":
        return
    if keys := unknown(setup):
        wrap.plan.refuse("deepspeed-precision", f"{', '.join(keys)} only known at run time")
        return
    dtype = "bfloat16" if setup.precision == "bf16" else "float16"
    wish = entry(setup.tree, "data_types.grad_accum_dtype") or entry(setup.tree, "communication_data_type")
    reduce = _DTYPES.get(str(wish), dtype)
    torch = draft.need_module("torch")
    policy = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
    casts = setup.precision == "fp16" and entry(setup.tree, "fp16.auto_cast", False) is True
    arguments = [f"param_dtype={torch}.{dtype}", f"reduce_dtype={torch}.{reduce}"]
    arguments += [] if casts else ["cast_forward_inputs=False"]
    wrap.plan.kwargs["mp_policy"] = (f"{policy}({', '.join(arguments)})",)
    wrap.plan.shared["mp_policy"] = ("mp_policy", "precision")
    parameter = draft.throwaway("parameter", "weight")
    rounded = "bfloat16" if dtype == "bfloat16" else "half"
    wrap.plan.step(
        Order.BROADCAST,
        f"for {parameter} in {MODEL}.parameters():",
        f"{draft.module.step()}{parameter}.data = {parameter}.data.{rounded}().float()",
    )
    message = f"{setup.precision}: fp32 masters start from rounded weights, as DeepSpeed's do"
    if setup.accumulates and reduce != "float32":
        message += f"; gradients of micro-batches are added in fp32, DeepSpeed adds them in {setup.precision}"
    if setup.precision == "fp16":
        message += "; the loss scale moves as DeepSpeed's does"
        if setup.stage == 0:
            message += ", which at stage 0 forgets to scale the loss: its gradients are too small and never clipped"
    else:
        message += "; steps with inf or nan are not skipped"
    draft.note(wrap.call, Grade.NUMERICS, message)
