"""The enable_wrap context goes; each wrap(x) in it becomes fully_shard(x).

What: `wrap(x, **overrides)` becomes `fully_shard(x, ...)` with the arguments of the enable_wrap context that it runs
under, and the context goes. `wrap(wrap(x))` becomes one call.

Why: `fully_shard` works in place, wherever the module is built; there is no wrapper class to choose.

Before::

    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        self.layer = wrap(nn.Linear(8, 8))

After::

    self.layer = fully_shard(nn.Linear(8, 8), reshard_after_forward=False)

In numbers: equal.

Known limits: outside of a context `wrap` returns its argument unwrapped. A wrap() that may run under several
contexts, or under none, is left with a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..wraps import ENABLE_WRAP, WRAP, Wrap

SOURCES = ("fsdp1",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """A wrap inside a wrap of the same module shards it once."""
    subject = wrap.subject
    if subject is None or not isinstance(subject.node, cst.Call):
        return
    if draft.flow.called(wrap.module, wrap.call) == WRAP == draft.flow.called(subject.module, subject.node):
        wrap.plan.merged = True
        draft.note(wrap.call, Grade.EXACT, "a wrap of a wrap becomes one call")


def rewrite(draft: Draft) -> None:
    """Remove the contexts, unless a `wrap` of the program stays: outside of a context it would wrap nothing."""
    if any(w.plan.refused and draft.flow.called(w.module, w.call) == WRAP for w in draft.all_wraps):
        return
    for call in draft.calls(ENABLE_WRAP):
        statement = draft.module.statement(call)
        if not isinstance(statement, cst.With):
            continue
        if len(statement.items) == 1 and draft.unwrap(statement):
            draft.note(call, Grade.EXACT, "the enable_wrap context goes: fully_shard works in place")
        else:
            draft.replace(call, f"{draft.need('contextlib', 'nullcontext')}()")
            draft.note(call, Grade.EXACT, "the enable_wrap context does nothing now: fully_shard works in place")
