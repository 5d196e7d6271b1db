"""model.clip_grad_norm_ becomes torch.nn.utils.clip_grad_norm_; a norm that is used is gathered with full_tensor().

What: the method of FSDP1 becomes the function of torch; so do calls of the function on the parameters of a sharded
model.

Why: `fully_shard` adds no such method. The function works on DTensors and clips by the norm over all ranks, but what
it returns is a DTensor: formatting it raises TypeError, and torch versions before 2.5 returned a partial sum whose
local value is no norm at all.

Before::

    norm = model.clip_grad_norm_(1.0)

After::

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()

In numbers: the norm is summed in another order, so that it may differ in the last bits (1e-7 relative in fp32).
`torch.nn.utils.clip_grad_norm_` on an FSDP1 model clipped each rank by the norm of its own shard, which is no
clipping by the norm of the model: such a call is graded numerics, because with FSDP2 it does what it says.

Where a model is sharded in some runs only, the function `whole`, written into the file, gathers what is a DTensor.

Known limits: with ignored modules that have gradients the function raises on the mix of tensors: clip the two groups
apart.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..uses import CLIP_FUNCTIONS, is_gathered, is_used, norm_of
from ..wraps import Wrap

SOURCES = ("fsdp1",)


def rewrite(draft: Draft) -> None:
    """Rewrite both forms."""
    for call, wraps in draft.methods("clip_grad_norm_", sources=("fsdp1",)):
        _method(draft, call, wraps)
    for call in draft.calls(*CLIP_FUNCTIONS):
        owner = _parameters_of(draft, call)
        wraps = draft.wraps_of(owner, "fsdp1") if owner is not None else []
        if not wraps:
            continue
        unsharded = all("NO_SHARD" in wrap.text("sharding_strategy") for wrap in wraps)
        if not unsharded:
            draft.note(
                call, Grade.NUMERICS, "FSDP1 clipped by the norm of each rank's shard here; now by the model's norm"
            )
        if is_used(draft, call) and not is_gathered(draft, call) and owner is not None:
            draft.replace(call, *norm_of(draft, call, owner))
            draft.note(call, Grade.EXACT, "the norm of a sharded model is a DTensor and is gathered")
        _warn_of_mix(draft, call, wraps)


def _method(draft: Draft, call: cst.Call, wraps: list[Wrap]) -> None:
    assert isinstance(call.func, cst.Attribute)
    torch = draft.need_module("torch")
    pieces: list = [f"{torch}.nn.utils.clip_grad_norm_(", *draft.module.quote(call.func.value), ".parameters()"]
    for argument in call.args:
        keyword = f"{argument.keyword.value}=" if argument.keyword is not None else argument.star
        pieces += [", ", keyword, *draft.module.quote(argument.value)]
    used = is_used(draft, call)
    draft.replace(call, *pieces, ").full_tensor()" if used else ")")
    gathered = "; the norm is a DTensor and is gathered" if used else ""
    draft.note(call, Grade.EXACT, f"clip_grad_norm_ of torch.nn.utils clips by the norm over all ranks{gathered}")
    _warn_of_mix(draft, call, wraps)


def _warn_of_mix(draft: Draft, call: cst.Call, wraps: list[Wrap]) -> None:
    if any("ignored_params" in wrap.plan.kwargs for wrap in wraps):
        draft.todo(call, "clip ignored parameters that have gradients in a call of their own: they are no DTensors")


def _parameters_of(draft: Draft, call: cst.Call) -> cst.BaseExpression | None:
    """`x` of `clip_grad_norm_(x.parameters(), ...)`."""
    first = call.args[0].value if call.args else None
    if isinstance(first, cst.Call) and isinstance(first.func, cst.Attribute) and first.func.attr.value == "parameters":
        return first.func.value
    return None
