"""zero.Init and GatheredParameters go where FSDP2 does without, or are left with what to do.

What: `with deepspeed.zero.Init(...):` goes, its body moves one level out. `with zero.GatheredParameters(...)` gets a
TODO: reading becomes `parameter.full_tensor()`, writing `set_model_state_dict`.

Why: `zero.Init` partitions parameters while they are made, so that a model larger than a device can be built. FSDP2
shards a model that is there; built on the CPU (or on the meta device) it never needs the device whole.

Before::

    with deepspeed.zero.Init():
        model = Model()

After::

    model = Model()

In numbers: equal; each rank builds the whole model in host memory first.

Known limits: for models that do not fit into host memory on every rank build under `torch.device("meta")`, and load
the weights after sharding.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade

SOURCES = ("deepspeed",)
_INIT = ("deepspeed.zero.Init", "deepspeed.runtime.zero.Init", "deepspeed.runtime.zero.partition_parameters.Init")


def rewrite(draft: Draft) -> None:
    """Take Init away; report GatheredParameters."""
    if any(w.plan.refused for w in draft.all_wraps if w.source == "deepspeed"):
        return
    for call in draft.calls(*_INIT):
        statement, item = draft.module.statement(call), draft.module.parent(call)
        alone = isinstance(statement, cst.With) and isinstance(item, cst.WithItem) and len(statement.items) == 1
        if alone and isinstance(statement, cst.With) and draft.unwrap(statement):
            draft.note(call, Grade.PERFORMANCE, "zero.Init goes: each rank builds the whole model before it is sharded")
        elif isinstance(item, (cst.WithItem, cst.IfExp)):
            draft.replace(call, f"{draft.need('contextlib', 'nullcontext')}()")
            draft.note(call, Grade.PERFORMANCE, "zero.Init goes: each rank builds the whole model before it is sharded")
    for call in draft.calls("deepspeed.zero.GatheredParameters"):
        draft.todo(
            call,
            "GatheredParameters: read with parameter.full_tensor() on all ranks, write with set_model_state_dict",
        )
