"""A DDP model is sharded block by block where a repeated block class is in sight, else as one group.

What: if the model's class, or one inside it, holds a ModuleList (or Sequential) that is built of one class in a
comprehension or a list, and its `forward` calls its items, each item becomes a group of its own.

Why: DDP has no wrapping: it keeps all parameters on all ranks. FSDP2 gathers the parameters of one group at a time; a
model that is one group is gathered whole.

Before::

    model = DDP(GPT())

After::

    model = GPT()
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)

With `find_unused_parameters=True` (or a value of the run) the model stays one group: a rank that skips a block would
not take part in gathering it, and the others would wait forever.

In numbers: equal; what differs is memory and communication.

Known limits: classes outside of the program are not looked into. Blocks whose layers are called from outside of them
are not meant to be groups, and are not made such.
"""

from __future__ import annotations

from ..blocks import repeated_blocks
from ..draft import Draft
from ..grade import Grade
from ..models import literal
from ..plan import UNIT, Unit
from ..wraps import Wrap

SOURCES = ("ddp", "deepspeed")


def plan(draft: Draft, wrap: Wrap) -> None:
    """Add a unit for each repeated block class."""
    unused = wrap.args.get("find_unused_parameters") if wrap.source == "ddp" else None
    if literal(draft, unused) is not False:
        message = "the model is one group: ranks that skip a block (find_unused_parameters) would miss its all-gather"
        draft.note(wrap.call, Grade.PERFORMANCE, message)
        return
    names = repeated_blocks(draft, wrap)
    if not names:
        message = "no repeated block class in sight: the model is one group; shard its blocks too if it is large"
        draft.note(wrap.call, Grade.PERFORMANCE, message)
        return
    test = names[0] if len(names) == 1 else f"({', '.join(names)})"
    wrap.plan.units.append(Unit((f"isinstance({UNIT}, {test})",)))
    draft.note(
        wrap.call, Grade.PERFORMANCE, f"parameters are sharded, and gathered for one {' or '.join(names)} at a time"
    )
