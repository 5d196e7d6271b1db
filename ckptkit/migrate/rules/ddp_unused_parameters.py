"""find_unused_parameters=True becomes set_reduce_scatter_unused_params, which is not quite the same.

What: after sharding, `model.set_reduce_scatter_unused_params(True)`.

Why: when a parameter is used on some ranks only, the ranks would reduce different groups and hang. With the setting
(new in torch 2.13) parameters without a gradient take part with zeros.

Before::

    model = DDP(model, find_unused_parameters=True)

After::

    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)

In numbers: equal when every parameter is used by some rank. A parameter that no rank uses in a step keeps `grad=None`
under DDP, so that the optimizer skips it, and gets a zero gradient here: momentum and weight decay go on moving it
(2e-2 of the loss in one program). If such parameters are never used on any rank, or the flag was only a precaution,
delete the line: without it FSDP2 leaves their gradient None as DDP did.

Known limits: torch before 2.13 does not have the setting.
"""

from __future__ import annotations

from ..draft import Draft
from ..grade import Grade
from ..models import literal
from ..plan import MODEL, Order
from ..rule import spell
from ..wraps import Wrap

SOURCES = ("ddp",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add the setting to the plan."""
    value = wrap.get("find_unused_parameters")
    if value is None:
        return
    truth = literal(draft, value)
    if truth is False:
        draft.note(wrap.call, Grade.EXACT, "find_unused_parameters=False goes")
        return
    argument = ("True",) if truth else spell(draft, wrap, value)
    if argument is None:
        draft.todo(wrap.call, "find_unused_parameters: call model.set_reduce_scatter_unused_params after sharding")
        return
    wrap.plan.step(Order.INIT, (f"{MODEL}.set_reduce_scatter_unused_params(", *argument, ")"))
    draft.note(
        wrap.call,
        Grade.NUMERICS,
        "find_unused_parameters becomes set_reduce_scatter_unused_params (torch 2.13): a parameter that no rank uses "
        "gets a zero gradient where DDP left None, so momentum and weight decay move it; delete the line if no rank "
        "differs from the others in what it uses",
    )
