"""The check that no wrap which is migrated changes what a wrap that stays takes as well: a policy, a model."""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .flow import Flow
from .wraps import Value, Wrap

# Methods of FSDP1's wrapper that a sharded module lacks, or has with another meaning.
_METHODS = ("clip_grad_norm_", "no_sync", "state_dict", "load_state_dict", "summon_full_params", "set_state_dict_type")
RULE = "wrap"


def changes_what_stays(flow: Flow, wrap: Wrap, wraps: list[Wrap]) -> bool:
    """Whether a plan rewrites objects where they are made that a wrap which was left to a person is given too."""
    mine = {id(call) for call, _ in wrap.plan.objects} | {id(call) for call in wrap.plan.edited}
    if not mine or wrap.plan.refused:
        return False
    return any(mine & taken_by(flow, other) for other in wraps if other.plan.refused)


def taken_by(flow: Flow, wrap: Wrap) -> set[int]:
    """The ids of the nodes at which a wrap's arguments, but for the model, were made."""
    values = [value for name, value in wrap.args.items() if name not in ("module", "model")]
    found: set[int] = set()
    for value in [*values, *wrap.carriers]:
        found.add(id(value.node))
        found |= {id(origin.node) for origin in flow.origins(value.module, value.node)}
        found |= _inside(value)
    return found


def _inside(value: Value) -> set[int]:
    return {id(call) for call in value.module.inside(value.node, cst.Call)}


def report(draft: Draft) -> None:
    """Leave a TODO where a method of FSDP1 is called on what may be a migrated model or one that stays."""
    if not any(wrap.plan.refused for wrap in draft.all_wraps):
        return
    for call in draft.module.every(cst.Call):
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in _METHODS or draft.module.skips(call):
            continue
        ids = {id(origin.node) for origin in draft.origins(func.value)}
        held = [wrap for wrap in draft.all_wraps if id(wrap.call) in ids and wrap.source == "fsdp1"]
        if len({wrap.plan.refused for wrap in held}) == 2:
            draft.todo(
                call,
                f"{func.attr.value} is called on models of which some stay FSDP1 and some become FSDP2: part them",
                RULE,
            )
