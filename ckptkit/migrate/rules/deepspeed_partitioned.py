"""zero.Init becomes the meta device on all ranks but the first, whose weights are loaded into the sharded model.

What: under `with deepspeed.zero.Init(...):` rank 0 builds the model in host memory, the other ranks build it without
memory on the meta device; after sharding rank 0's weights (and buffers) are sent into the shards. Where the body loads
weights itself (`from_pretrained`, `load_state_dict`), where Init is conditional, or where parameters are offloaded,
Init goes and each rank builds the whole model.

Why: `zero.Init` partitions parameters while they are made, so that a model larger than a device, and no copy of it for
every rank, is ever whole. `fully_shard` shards a model that is there.

Before::

    with deepspeed.zero.Init():
        model = Model()

After::

    with nullcontext() if dist.get_rank() == 0 else torch.device("meta"):
        model = Model()

In numbers: the model starts from rank 0's weights, as DeepSpeed's does. Ranks on the meta device do not draw the random
numbers of the initialisation: what they draw later is another part of their sequence, unless they seed after it.

Known limits: rank 0 holds the whole model in host memory once. A constructor that reads values of tensors
(`linspace(...).item()`) fails on the meta device: build such parts under `torch.device("cpu")`.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..ds_setup import INIT, local_device, partitioned
from ..grade import Grade
from ..models import may_have_buffers
from ..plan import MODEL, Order
from ..state import STATE
from ..wraps import Wrap

SOURCES = ("deepspeed",)
_DROPPED = "zero.Init goes: each rank builds the whole model before it is sharded"
_META = (
    "zero.Init becomes the meta device on all ranks but the first, whose weights are loaded after sharding; "
    "other ranks do not draw the random numbers of the initialisation"
)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Load rank 0's weights after sharding."""
    if partitioned(draft, wrap) is None:
        return
    dist, step = draft.need_module("torch.distributed", "dist"), draft.module.step()
    load, options = draft.need(STATE, "set_model_state_dict"), draft.need(STATE, "StateDictOptions")
    state = draft.fresh("full_state", "rank0_state")
    wrap.plan.step(Order.PREPARE, f"{state} = {MODEL}.state_dict() if {dist}.get_rank() == 0 else {{}}")
    lines = [
        f"if {dist}.get_rank() != 0:",
        f"{step}{MODEL}.to_empty(device={local_device(draft)}())",
        f"{load}(\n{step}{MODEL}, {state}, options={options}(full_state_dict=True, broadcast_from_rank0=True)\n)",
    ]
    if may_have_buffers(draft, wrap):
        buffer = draft.throwaway("buffer", "tensor")
        lines += [f"for {buffer} in {MODEL}.buffers():", f"{step}{dist}.broadcast({buffer}, src=0)"]
    wrap.plan.step(Order.INIT, *lines)


def rewrite(draft: Draft) -> None:
    """Rewrite or take away each Init."""
    if any(w.plan.refused for w in draft.all_wraps if w.source == "deepspeed"):
        return
    kept = {id(w.facts.get("zero.Init")) for w in draft.all_wraps if w.facts.get("zero.Init") is not None}
    for call in draft.calls(*INIT):
        statement, item = draft.module.statement(call), draft.module.parent(call)
        if id(call) in kept:
            _to_meta(draft, call)
            continue
        alone = isinstance(statement, cst.With) and isinstance(item, cst.WithItem) and len(statement.items) == 1
        if alone and isinstance(statement, cst.With) and draft.unwrap(statement):
            draft.note(call, Grade.PERFORMANCE, _DROPPED)
        elif isinstance(item, (cst.WithItem, cst.IfExp)):
            draft.replace(call, f"{draft.need('contextlib', 'nullcontext')}()")
            draft.note(call, Grade.PERFORMANCE, _DROPPED)


def _to_meta(draft: Draft, call: cst.Call) -> None:
    dist, torch = draft.need_module("torch.distributed", "dist"), draft.need_module("torch")
    nothing, step = draft.need("contextlib", "nullcontext"), draft.module.step()
    start = draft.module.span(draft.module.statement(call)).start
    above = draft.module.text.masked[:start]
    if "init_process_group(" not in above and "init_distributed(" not in above:
        draft.before(call, (f"if not {dist}.is_initialized():",), (f"{step}{dist}.init_process_group()",))
    draft.replace(call, f'{nothing}() if {dist}.get_rank() == 0 else {torch}.device("meta")')
    draft.note(call, Grade.NUMERICS, _META)
