"""use_orig_params, limit_all_gathers and the prefetch arguments go; FSDP2 always does what they asked for.

What: `use_orig_params`, `limit_all_gathers`, `forward_prefetch` and `backward_prefetch` are removed.

Why: FSDP2 keeps the original parameters, always limits all-gathers, and always prefetches in backward as BACKWARD_PRE
did.

Before::

    model = FSDP(model, use_orig_params=True, limit_all_gathers=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)

After::

    fully_shard(model)

In numbers: equal. BACKWARD_POST and None have no counterpart, and forward_prefetch=True would need explicit
`set_modules_to_forward_prefetch` calls: other memory and speed, same numbers.

Known limits: `p.numel()` of a sharded parameter is the whole parameter's in FSDP2 and the local shard's in FSDP1, so
code that counts parameters after wrapping prints another (the true) number. With use_orig_params=False the optimizer
saw flat parameters: optimizers that are not elementwise (LAMB, Adafactor, Muon) take other steps on the original
ones.
"""

from __future__ import annotations

from ..draft import Draft
from ..grade import Grade
from ..models import literal
from ..wraps import Wrap

SOURCES = ("fsdp1",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Claim the arguments that need no counterpart."""
    for name in ("use_orig_params", "limit_all_gathers"):
        if name in wrap.args:
            wrap.get(name)
            draft.note(wrap.call, Grade.EXACT, f"{name} is always on in FSDP2")
    if "forward_prefetch" in wrap.args:
        value = wrap.get("forward_prefetch")
        on = value is not None and literal(draft, value) is not False
        message = (
            "forward_prefetch needs explicit set_modules_to_forward_prefetch calls" if on else "forward_prefetch goes"
        )
        draft.note(wrap.call, Grade.PERFORMANCE if on else Grade.EXACT, message)
    if "backward_prefetch" in wrap.args:
        value = wrap.get("backward_prefetch")
        same = value is not None and draft.flow.name(value.module, value.node).endswith("BackwardPrefetch.BACKWARD_PRE")
        message = "backward_prefetch is always BACKWARD_PRE in FSDP2"
        draft.note(wrap.call, Grade.EXACT if same else Grade.PERFORMANCE, message)
