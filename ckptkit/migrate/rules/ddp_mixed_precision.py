"""mixed_precision=_MixedPrecision(...) of DDP becomes a MixedPrecisionPolicy.

What: param_dtype and reduce_dtype are carried over.

Before::

    model = DDP(model, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

After::

    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

In numbers: DDP rounds gradients to param_dtype before it reduces them, FSDP2 to reduce_dtype; buffers keep their dtype
in FSDP2. Differences are of the size of the low precision.

Known limits: the object must be made in a place that the rule can see.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..origin import CALL
from ..plan import Line
from ..rule import spell
from ..syntax import argument_of
from ..wraps import Value, Wrap

SOURCES = ("ddp",)
_FIELDS = ["param_dtype", "reduce_dtype", "buffer_dtype"]


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add the policy to the plan."""
    value = wrap.get("mixed_precision")
    if value is None:
        return
    origins = list(draft.flow.origins(value.module, value.node))
    made = origins[0] if len(origins) == 1 and origins[0].kind == CALL else None
    if made is None or not isinstance(made.node, cst.Call):
        wrap.plan.refuse("ddp-mixed-precision", "the mixed precision of this model is only known at run time")
        return
    arguments: list[Line] = []
    for name in _FIELDS[:2]:
        given = argument_of(made.node, _FIELDS, name)
        spelled = spell(draft, wrap, Value(made.module, given)) if given is not None else None
        if spelled is not None:
            arguments.append((f"{name}=", *spelled))
    policy = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
    pieces: list = [f"{policy}("]
    for index, argument in enumerate(arguments):
        pieces += [", " if index else "", *argument]
    wrap.plan.kwargs["mp_policy"] = (*pieces, ")")
    wrap.plan.shared["mp_policy"] = ("mp_policy", "precision")
    draft.note(
        wrap.call, Grade.NUMERICS, "gradients are reduced in reduce_dtype; DDP rounded them to param_dtype first"
    )
