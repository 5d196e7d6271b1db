"""model.module goes: after fully_shard the model is the module itself.

What: `.module` and `._fsdp_wrapped_module` on a sharded model become the model; `x.module if hasattr(x, "module")
else x` becomes `x`.

Before::

    model.module.embed.weight

After::

    model.embed.weight

In numbers: equal.

Known limits: a model that may also be wrapped by something that stays (a wrap that was left with a TODO) keeps its
`.module`, and has a TODO there.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..names import DDP, FSDP
from ..syntax import is_store

SOURCES = ("fsdp1", "ddp", "deepspeed")
_FSDP2 = "torch.distributed.fsdp"
_INNER = ("module", "_fsdp_wrapped_module")


def rewrite(draft: Draft) -> None:
    """Rewrite every access on a sharded model."""
    module = draft.module
    for node in module.every(cst.Attribute):
        if node.attr.value not in _INNER or is_store(module, node) or module.skips(node):
            continue
        if not draft.wraps_of(node.value, *SOURCES):
            if _is_either(draft, node.value):
                draft.todo(
                    node, f"the wrap that was left has a .{node.attr.value}, a sharded model is the module itself"
                )
            continue
        if _unwraps_in_loop(draft, node):
            continue
        choice = module.parent(node)
        if (
            isinstance(choice, cst.IfExp)
            and choice.body is node
            and draft.code(choice.orelse) == draft.code(node.value)
        ):
            draft.replace(choice, *module.quote(node.value))
        else:
            draft.replace(node, *module.quote(node.value))
        draft.note(node, Grade.EXACT, f"the sharded model is the module: .{node.attr.value} goes")


def _is_either(draft: Draft, node: cst.BaseExpression) -> bool:
    """Whether a model may come from a wrap that is migrated and from one that stays."""
    origins = {id(origin.node) for origin in draft.origins(node)}
    return len({wrap.plan.refused for wrap in draft.all_wraps if id(wrap.call) in origins}) == 2


def _unwraps_in_loop(draft: Draft, node: cst.Attribute) -> bool:
    """Deal with `while isinstance(model, DDP): model = model.module`, which would not end: a sharded model stays one.

    The loop goes. `while hasattr(model, "module")` is left: it ends by itself.
    """
    module, code = draft.module, draft.code(node.value)
    statement = module.statement(node)
    loop = module.up(node, cst.While)
    same = (
        isinstance(statement, cst.Assign)
        and statement.value is node
        and draft.code(statement.targets[0].target) == code
    )
    if loop is None or not same or code not in draft.code(loop.test):
        return False
    test = loop.test
    if isinstance(test, cst.Call) and draft.name(test.func) == "builtins.hasattr":
        return True
    lines = getattr(loop.body, "body", ())
    asks = isinstance(test, cst.Call) and draft.name(test.func) == "builtins.isinstance" and len(test.args) == 2
    if asks and len(lines) == 1 and loop.orelse is None and draft.name(test.args[1].value) in (DDP, FSDP):  # type: ignore[attr-defined]
        span = module.span(loop)
        draft.edits[:] = [edit for edit in draft.edits if not span.holds(edit.span)]
        if not any("FSDPModule" in str(edit.pieces) for edit in draft.edits):
            draft.needs.pop((_FSDP2, "FSDPModule"), None)
        draft.delete(loop)
        draft.note(node, Grade.EXACT, "the sharded model is the module: the loop that unwrapped it goes")
    else:
        draft.todo(node, "a sharded model is the module itself: this loop must end at it")
    return True
