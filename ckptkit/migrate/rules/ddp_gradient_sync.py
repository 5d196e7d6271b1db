"""model.require_backward_grad_sync = x becomes model.set_requires_gradient_sync(x).

What: assignments of the flag by which DDP itself implements no_sync.

Before::

    model.require_backward_grad_sync = micro_step == accumulation - 1

After::

    model.set_requires_gradient_sync(micro_step == accumulation - 1)

In numbers: equal.

Known limits: reading the flag is left over: FSDP2 modules do not tell it.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..syntax import is_store

SOURCES = ("ddp",)


def rewrite(draft: Draft) -> None:
    """Rewrite assignments; report reads."""
    module = draft.module
    for node in module.every(cst.Attribute):
        if node.attr.value != "require_backward_grad_sync" or not draft.wraps_of(node.value, "ddp"):
            continue
        statement = module.statement(node)
        alone = isinstance(statement, cst.Assign) and len(statement.targets) == 1 and is_store(module, node)
        if alone and isinstance(statement, cst.Assign) and statement.targets[0].target is node:
            draft.replace(
                statement,
                *module.quote(node.value),
                ".set_requires_gradient_sync(",
                *module.quote(statement.value),
                ")",
            )
            draft.note(node, Grade.EXACT, "the gradient synchronisation flag of FSDP2 is set by a method")
        else:
            draft.todo(node, "FSDP2 does not tell its gradient synchronisation flag: keep it in a variable")
