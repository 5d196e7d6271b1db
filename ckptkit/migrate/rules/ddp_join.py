"""Models trained under join() on uneven inputs are left with DDP.

What: a wrap whose model is used with `model.join()` or `Join([model])` is refused, with a TODO.

Why: DDP's join lets ranks that ran out of data answer the collectives of the others. FSDP2 has nothing like it: a rank
that stops early makes all others wait forever.

Before::

    with model.join():
        for batch in loader: ...

After: unchanged. Give all ranks equally many batches (DistributedSampler pads, or drop_last=True), delete the join,
and migrate again.

In numbers: nothing changes.

Known limits: none.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..wraps import Wrap

SOURCES = ("ddp",)
_JOIN = "torch.distributed.algorithms."
_REASON = "join() has no counterpart: give all ranks equally many batches, take the join away, and migrate again"


def plan(draft: Draft, wrap: Wrap) -> None:
    """Refuse wraps that are joined anywhere in the program."""
    for peer in draft.peers.values():
        for call in peer.module.every(cst.Call):
            name = peer.flow.called(peer.module, call)
            joins = name.startswith(_JOIN) and name.endswith("Join")
            func = call.func
            method = isinstance(func, cst.Attribute) and func.attr.value == "join" and wrap in peer.wraps_of(func.value)
            if method or (joins and any(wrap in peer.wraps_of(n) for n in peer.module.inside(call, cst.Name))):
                wrap.plan.refuse("ddp-join", _REASON)
                return
