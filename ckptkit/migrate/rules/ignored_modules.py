"""ignored_modules and ignored_states become ignored_params on every call, and the loop skips the ignored modules.

What: `ignored_modules=[a, b]` becomes a set of their parameters, passed to every `fully_shard` call; modules inside the
ignored ones get no group. `ignored_states` may be modules or parameters, and is asked at run time where its text does
not tell; `ignored_parameters` was its name in torch 2.0.

Before::

    model = FSDP(model, auto_wrap_policy=policy, ignored_modules=[model.frozen])

After::

    ignored_modules = {m for root in [model.frozen] for m in root.modules()}
    ignored_params = {p for m in ignored_modules for p in m.parameters()}
    for module in reversed(list(model.modules())[1:]):
        if module not in ignored_modules and isinstance(module, Block):
            fully_shard(module, ignored_params=ignored_params)
    fully_shard(model, ignored_params=ignored_params)

In numbers: equal; the gradients of ignored parameters are not reduced, in FSDP1 as in FSDP2.

Known limits: the model then holds plain tensors beside DTensors. `clip_grad_norm_` over both, and optimizers with
`foreach=True`, raise; the rule gradient-clipping reports it. fully_shard moves the buffers of ignored modules to the
device.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..plan import UNIT, Line, Order
from ..rule import spell
from ..wraps import Value, Wrap

SOURCES = ("fsdp1",)
_NAMES = ("ignored_modules", "ignored_states", "ignored_parameters")


def plan(draft: Draft, wrap: Wrap) -> None:
    """Collect the ignored parameters before sharding."""
    name = next((one for one in _NAMES if wrap.text(one) not in ("", "None")), "ignored_modules")
    for other in _NAMES:
        wrap.get(other)
    value = wrap.get(name)
    if value is None:
        return
    here = spell(draft, wrap, value)
    if here is None:
        wrap.plan.refuse(
            "ignored-modules", f"the ignored modules {value.module.code(value.node)} are out of reach here"
        )
        return
    params = draft.throwaway("ignored_params", "unsharded_params")
    if name == "ignored_parameters" or (name == "ignored_states" and _are_parameters(value)):
        wrap.plan.step(Order.PREPARE, (f"{params} = set(", *here, ")"))
    else:
        modules = draft.throwaway("ignored", "unsharded_modules")
        if name == "ignored_modules":
            lines: list[Line] = [(f"{modules} = {{m for root in ", *here, " for m in root.modules()}")]
            lines.append((f"{params} = {{p for m in {modules} for p in m.parameters()}}",))
        else:
            states = draft.throwaway("ignored_states", "unsharded_states")
            nn = draft.need_module("torch.nn", "nn")
            lines = [
                (f"{states} = list(", *here, ")"),
                (f"{modules} = {{m for s in {states} if isinstance(s, {nn}.Module) for m in s.modules()}}",),
                (f"{params} = {{p for m in {modules} for p in m.parameters()}}",),
                (f"{params} |= {{s for s in {states} if isinstance(s, {nn}.Parameter)}}",),
            ]
        wrap.plan.step(Order.PREPARE, *lines)
        wrap.plan.guards.append((f"{UNIT} not in {modules}",))
        wrap.plan.ignored = (modules,)
    wrap.plan.kwargs["ignored_params"] = (params,)
    draft.note(wrap.call, Grade.EXACT, "ignored modules become ignored_params; the loop skips them")


def _are_parameters(value: Value) -> bool:
    """Whether the expression lists parameters, as far as its text tells."""
    return "parameters(" in value.module.code(value.node) or not isinstance(
        value.node, (cst.List, cst.Tuple, cst.Set, cst.Name, cst.Attribute, cst.ListComp, cst.Call)
    )
