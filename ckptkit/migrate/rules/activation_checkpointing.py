"""Activation checkpointing that is applied after FSDP moves before the sharding.

What: `apply_activation_checkpointing(model, ...)`, or a call of a function of the program that does it, in the block
of the wrap and below it, moves before the `fully_shard` calls.

Why: FSDP1 scripts wrap first and checkpoint after. With FSDP2 the order of the tutorials is checkpointing, compile,
sharding: the checkpointed module is then a part of the shard group, so that what is recomputed in backward is
gathered once.

Before::

    model = FSDP(model, auto_wrap_policy=policy)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=is_block)

After::

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=is_block)
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)

In numbers: equal; checkpointing before, after and around gives the same losses and gradients, and state dict keys are
clean in all.

Known limits: a call in another block (under an `if` of its own with other statements) or in another function stays
where it is, which works, with another order of gathering. CheckpointImpl.REENTRANT works but is deprecated.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..events import inside
from ..grade import Grade
from ..module import Module
from ..names import CHECKPOINT_WRAPPER, FSDP
from ..plan import MODEL, Line, Order
from ..wraps import Wrap

SOURCES = ("fsdp1",)
APPLY = CHECKPOINT_WRAPPER + ".apply_activation_checkpointing"


def plan(draft: Draft, wrap: Wrap) -> None:
    """Emit the checkpointing before the shard calls."""
    for line, call in _below(draft, wrap):
        wrap.plan.step(Order.CHECKPOINTING, _renamed(draft, line, call))


def rewrite(draft: Draft) -> None:
    """Take the moved calls away from below, and report those that stay."""
    moved = []
    for wrap in draft.wraps:
        if wrap.plan.refused:
            continue
        for line, call in _below(draft, wrap):
            if isinstance(line, cst.SimpleStatementLine):
                draft.delete(line.body[0])
            else:
                draft.replace_span(draft.module.lines(line))
                draft.deleted.append(line)
            draft.note(call, Grade.EXACT, "activation checkpointing is applied before sharding")
            moved.append(call)
    if moved:
        return
    for call in draft.calls(APPLY):
        if call.args and draft.wraps_of(call.args[0].value):
            draft.note(call, Grade.PERFORMANCE, "activation checkpointing stays after sharding: same numbers")


def _below(draft: Draft, wrap: Wrap) -> list[tuple[cst.CSTNode, cst.Call]]:
    """Lines below the wrap in its block that do nothing but checkpoint its model."""
    module = draft.module
    here = module.line(wrap.call)
    if isinstance(here, cst.SimpleStatementSuite):
        return []
    block = module.parent(here)
    found = []
    for line in getattr(block, "body", ()):
        if module.span(line).start <= module.span(here).start:
            continue
        calls = _checkpoints(draft, wrap, line)
        if calls:
            found.append((line, calls[0]))
    return found


def _checkpoints(draft: Draft, wrap: Wrap, line: cst.CSTNode) -> list[cst.Call]:
    if isinstance(line, cst.If):
        if line.orelse is not None or not isinstance(line.body, cst.IndentedBlock):
            return []
        inner = [_checkpoints(draft, wrap, one) for one in line.body.body]
        return [call for calls in inner for call in calls] if all(inner) else []
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1 or not isinstance(line.body[0], cst.Expr):
        return []
    call = line.body[0].value
    if not isinstance(call, cst.Call) or not call.args:
        return []
    origins = {id(o.node) for o in draft.origins(call.args[0].value)}
    if id(wrap.call) not in origins or any(draft.name(node) == FSDP for node in draft.module.inside(call, cst.Name)):
        return []
    return [call] if _applies(draft, draft.module, call) or inside(draft, draft.module, call, _applies, 3) else []


def _applies(draft: Draft, module: Module, call: cst.Call) -> bool:
    return draft.flow.called(module, call) == APPLY


def _renamed(draft: Draft, line: cst.CSTNode, call: cst.Call) -> Line:
    """The line with its model called `$model`."""
    span, model = draft.module.span(line), draft.module.span(call.args[0].value)
    stop = draft.module.lines(line).stop
    content = draft.module.text.content
    while content[stop - 1] in " \t\r\n":
        stop -= 1
    part = type(span)
    return (part(span.start, model.start), MODEL, part(model.stop, stop))
