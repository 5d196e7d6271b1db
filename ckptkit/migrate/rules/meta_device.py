"""param_init_fn goes: parameters on the meta device are materialised and initialised after sharding.

What: `param_init_fn=fn` becomes `model.to_empty(device=...)` after all `fully_shard` calls, and `fn` on each module.
The usual pair `param_init_fn=(to_empty on all ranks but 0), sync_module_states=True`, where rank 0 holds the weights
and the other ranks meta parameters, becomes a load of rank 0's state dict into the sharded model. A model that is
built under `torch.device("meta")` without param_init_fn gets `to_empty` and `reset_parameters`, which FSDP1 called by
itself.

Before::

    model = FSDP(model, param_init_fn=init if rank != 0 else None, sync_module_states=True)

After::

    full_state = model.state_dict() if dist.get_rank() == 0 else {}
    fully_shard(model)
    if dist.get_rank() != 0:
        model.to_empty(device=...)
    set_model_state_dict(model, full_state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

In numbers: equal where rank 0's weights are loaded. Initialising sharded parameters draws other random numbers than
initialising whole ones: other start, same distribution.

Known limits: buffers that are not in the state dict (persistent=False) are uninitialised after `to_empty`: they are
broadcast from rank 0 where it holds them, and otherwise left to reset_parameters or a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..models import literal, may_have_buffers
from ..plan import MODEL, Line, Order
from ..rule import spell
from ..wraps import Wrap

SOURCES = ("fsdp1",)
_STATE = "torch.distributed.checkpoint.state_dict"


def plan(draft: Draft, wrap: Wrap) -> None:
    """Materialise after sharding."""
    value = wrap.get("param_init_fn")
    if value is None:
        if _built_on_meta(draft, wrap):
            _reset(draft, wrap)
        return
    sync = wrap.args.get("sync_module_states")
    if sync is not None and literal(draft, sync) is not False:
        _from_rank_0(draft, wrap)
        return
    here = spell(draft, wrap, value)
    if here is None:
        wrap.plan.refuse("meta-device", f"param_init_fn={wrap.text('param_init_fn')} is out of reach at this call")
        return
    step = draft.module.step()
    module = draft.throwaway("module", "submodule", "unit")
    function: Line = (
        ("(", *here, ")") if isinstance(value.node, (cst.Lambda, cst.IfExp)) and not value.node.lpar else here
    )
    wrap.plan.step(
        Order.INIT,
        (f"{MODEL}.to_empty(device=", *_device(draft, wrap), ")"),
        (f"for {module} in {MODEL}.modules():",),
        (f"{step}if any(True for _ in {module}.parameters(recurse=False)):",),
        (f"{step * 2}", *function, f"({module})"),
    )
    draft.note(
        wrap.call, Grade.NUMERICS, "param_init_fn runs on sharded parameters: other random numbers, same distribution"
    )


def _from_rank_0(draft: Draft, wrap: Wrap) -> None:
    dist = draft.need_module("torch.distributed", "dist")
    load = draft.need(_STATE, "set_model_state_dict")
    options = draft.need(_STATE, "StateDictOptions")
    step = draft.module.step()
    state = draft.fresh("full_state", "rank0_state")
    wrap.plan.step(Order.BROADCAST, f"{state} = {MODEL}.state_dict() if {dist}.get_rank() == 0 else {{}}")
    if may_have_buffers(draft, wrap):
        buffers = draft.fresh("rank0_buffers", "whole_buffers")
        wrap.plan.step(Order.BROADCAST, f"{buffers} = dict({MODEL}.named_buffers())")
        buffer = draft.throwaway("buffer", "tensor")
        again: tuple[str, ...] = (
            f"for name, {buffer} in {MODEL}.named_buffers():",
            f"{step}if {dist}.get_rank() == 0:",
            f"{step * 2}{buffer}.copy_({buffers}[name])",
            f"{step}{dist}.broadcast({buffer}, src=0)",
        )
    else:
        again = ()
    wrap.plan.step(
        Order.INIT,
        f"if {dist}.get_rank() != 0:",
        (f"{step}{MODEL}.to_empty(device=", *_device(draft, wrap), ")"),
        f"{load}(\n{step}{MODEL}, {state}, options={options}(full_state_dict=True, broadcast_from_rank0=True)\n)",
        *again,
    )
    draft.note(wrap.call, Grade.EXACT, "rank 0's weights are loaded into the sharded model")


def _reset(draft: Draft, wrap: Wrap) -> None:
    step = draft.module.step()
    module = draft.throwaway("module", "submodule", "unit")
    wrap.plan.step(
        Order.INIT,
        (f"{MODEL}.to_empty(device=", *_device(draft, wrap), ")"),
        (f"for {module} in {MODEL}.modules():",),
        (f'{step}if hasattr({module}, "reset_parameters"):',),
        (f"{step * 2}{module}.reset_parameters()",),
    )
    draft.note(
        wrap.call, Grade.NUMERICS, "meta parameters are initialised sharded: other random numbers, same distribution"
    )


def _device(draft: Draft, wrap: Wrap) -> Line:
    value = wrap.args.get("device_id")
    here = spell(draft, wrap, value) if value is not None and wrap.text("device_id") != "None" else None
    return here if here is not None else ('"cuda"',)


def _built_on_meta(draft: Draft, wrap: Wrap) -> bool:
    """Whether the model is made inside `with torch.device("meta")` (not by some ranks only: that needs
    param_init_fn).
    """
    subject = wrap.subject
    if subject is None:
        return False
    for call in subject.module.every(cst.Call):
        origins = draft.flow.origins(subject.module, call)
        if not origins or not origins <= draft.flow.origins(subject.module, subject.node):
            continue
        holder = subject.module.up(call, cst.With)
        while holder is not None:
            for item in holder.items:
                text = subject.module.code(item.item).replace("'", '"')
                if text in ('torch.device("meta")', 'torch.device(device="meta")'):
                    return True
            holder = subject.module.up(holder, cst.With)
    return False
