"""Calling a sharded model on one rank only is reported: all ranks must take part in gathering its parameters.

What: a call of the model under `if rank == 0:`, or in a function that is only called under such a guard, gets a TODO.

Why: with DDP every rank holds the whole model, and rank 0 may evaluate it alone. A sharded model gathers parameters
from all ranks in every forward: alone, rank 0 waits forever.

Before::

    if rank == 0:
        accuracy = evaluate(model)

After::

    # TODO(ckptkit): all ranks must run this: ...
    if rank == 0:
        accuracy = evaluate(model)

In numbers: a hang, if it is left.

Known limits: guards are told by their text (`rank == 0`, `is_main_process`, ...), and looked for in the function of
the call and around the calls of that function.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..left_early import left_before
from ..models import runs_layers
from ..ranks import rank_guard
from ..replicas import holding

SOURCES = ("ddp", "deepspeed")
_REASON = "all ranks must run this: a sharded model gathers its parameters from all of them in every forward"


def rewrite(draft: Draft) -> None:
    """Report calls of sharded models under rank guards."""
    module = draft.module
    said: set[int] = set()
    for call in module.every(cst.Call):
        if module.skips(call) or not _runs(draft, call):
            continue
        guard = rank_guard(draft, call) or left_before(draft, call)
        if guard is not None:
            if id(guard) not in said:
                said.add(id(guard))
                draft.todo(guard, _REASON)
            continue
        function = module.function(call)
        if not isinstance(function, cst.FunctionDef):
            continue
        for where, outer in draft.flow.callers(module, function):
            peer = draft.peers.get(id(where))
            if peer is not None and id(outer) not in said and rank_guard(peer, outer) is not None:
                said.add(id(outer))
                if not where.skips(outer):
                    peer.todo(outer, _REASON, draft.rule)


def _runs(draft: Draft, call: cst.Call) -> bool:
    """Whether a call runs a sharded model: the model itself, `generate`, or a method of its class that runs layers."""
    func = call.func
    if not isinstance(func, (cst.Name, cst.Attribute)):
        return False
    if holding(draft, func, *SOURCES):
        return True
    if not isinstance(func, cst.Attribute):
        return False
    wraps = holding(draft, func.value, *SOURCES)
    name = func.attr.value
    return bool(wraps) and (name in ("generate", "forward") or any(runs_layers(draft, wrap, name) for wrap in wraps))
