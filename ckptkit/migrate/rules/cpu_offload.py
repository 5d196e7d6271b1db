"""cpu_offload=CPUOffload(offload_params=True) becomes offload_policy=CPUOffloadPolicy() on every call.

What: the argument is replaced; CPUOffload(False) and None go. A run-time choice stays one.

Before::

    model = FSDP(model, cpu_offload=CPUOffload(offload_params=True))

After::

    fully_shard(model, offload_policy=CPUOffloadPolicy())

In numbers: equal. Both pin memory.

Known limits: FSDP1 documents that gradients must not be accumulated outside no_sync with offload; FSDP2 accumulates
rightly.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..origin import CALL, LITERAL
from ..plan import Line
from ..rule import spell
from ..syntax import argument_of
from ..wraps import Value, Wrap

SOURCES = ("fsdp1",)
OFFLOAD = "torch.distributed.fsdp.CPUOffload"


def plan(draft: Draft, wrap: Wrap) -> None:
    """Carry the offload over to every call."""
    value = wrap.get("cpu_offload")
    if value is None:
        return
    choice = _offloads(draft, wrap, value)
    if choice is None:
        wrap.plan.refuse("cpu-offload", f"cpu_offload={wrap.text('cpu_offload')} is only known at run time")
        return
    if choice == ("False",):
        draft.note(wrap.call, Grade.EXACT, "cpu_offload off needs no argument")
        return
    policy = draft.need("torch.distributed.fsdp", "CPUOffloadPolicy")
    if choice == ("True",):
        wrap.plan.kwargs["offload_policy"] = (f"{policy}()",)
    else:
        nothing = draft.need("torch.distributed.fsdp", "OffloadPolicy")
        wrap.plan.kwargs["offload_policy"] = (f"{policy}() if ", *choice, f" else {nothing}()")
        wrap.plan.shared["offload_policy"] = ("offload_policy", "fsdp_offload_policy")
    draft.note(wrap.call, Grade.EXACT, "cpu_offload becomes offload_policy")


def _offloads(draft: Draft, wrap: Wrap, value: Value) -> Line | None:
    """An expression that says whether to offload: `True`, `False`, or one of the program's own."""
    node = value.node
    if isinstance(node, cst.IfExp):
        body, orelse = (_offloads(draft, wrap, Value(value.module, n)) for n in (node.body, node.orelse))
        test = spell(draft, wrap, Value(value.module, node.test))
        if test is None:
            return None
        if body == ("True",) and orelse == ("False",):
            return test
        if body == ("False",) and orelse == ("True",):
            return ("not (", *test, ")")
        return None
    origins = draft.flow.origins(value.module, node)
    if len(origins) != 1:
        return None
    origin = next(iter(origins))
    if origin.kind == LITERAL and origin.name in ("None", "False"):
        return ("False",)
    if isinstance(origin.node, cst.IfExp):
        return _offloads(draft, wrap, Value(origin.module, origin.node))
    if origin.kind != CALL or origin.name != OFFLOAD or not isinstance(origin.node, cst.Call):
        return None
    given = argument_of(origin.node, ["offload_params"], "offload_params")
    if given is None:
        return ("False",)
    text = origin.module.code(given)
    if text in ("True", "False"):
        return (text,)
    return spell(draft, wrap, Value(origin.module, given))
