"""An optimizer that is made before the model is sharded moves behind it, with its scheduler and all that uses them.

What: statements that make an optimizer from the parameters of a model which is wrapped further down in the same
block, and the statements between that depend on the optimizer, move behind the wrap.

Why: with FSDP1 (use_orig_params=True) the optimizer may come first: the parameters stay the same objects.
`fully_shard` replaces them by DTensors. An optimizer that holds the old ones updates tensors that nothing uses: the
loss stays where it is, and nothing raises.

Before::

    optimizer = AdamW(model.parameters())
    scheduler = LambdaLR(optimizer, warmup)
    model = FSDP(model, use_orig_params=True)

After::

    fully_shard(model)
    optimizer = AdamW(model.parameters())
    scheduler = LambdaLR(optimizer, warmup)

In numbers: equal.

Known limits: follows calls into functions and methods of the run, within one block of statements. Where the optimizer
is made in another block or in another thread of calls than the wrap, a TODO says so.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..events import Event, makes_optimizer, shards
from ..flow import assigned_names
from ..grade import Grade
from ..plan import Order

SOURCES = ("fsdp1", "ddp", "deepspeed")


def rewrite(draft: Draft) -> None:
    """Move optimizers of every block behind its wraps."""
    for block in (draft.module.tree, *draft.module.every(cst.IndentedBlock)):
        _reorder(draft, list(block.body))  # type: ignore[attr-defined]


def _reorder(draft: Draft, lines: list[cst.CSTNode]) -> None:
    sharded = [(i, event) for i, line in enumerate(lines) for event in shards(draft, line)]
    if not sharded:
        return
    for index, line in enumerate(lines):
        for event in makes_optimizer(draft, line):
            later = [i for i, wrap in sharded if i > index and _same_model(event, wrap)]
            if later:
                _move(draft, lines, index, max(later))
                return


def _same_model(optimizer: Event, wrap: Event) -> bool:
    return bool(optimizer.models & wrap.models)


def _move(draft: Draft, lines: list[cst.CSTNode], first: int, anchor: int) -> None:
    """Move line `first` and what depends on it, up to the anchor, behind the anchor."""
    moved = [first]
    names = _bound(draft, lines[first])
    for index in range(first + 1, anchor):
        if names & _read(draft, lines[index]):
            moved.append(index)
            names |= _bound(draft, lines[index])
    handed_over = any(w.source == "deepspeed" and draft.module.within(w.call, lines[anchor]) for w in draft.wraps)
    if names & _read(draft, lines[anchor]) and not handed_over:
        draft.todo(
            lines[first], "the optimizer must be made after the model is sharded, but the sharding statement uses it"
        )
        return
    if any(isinstance(lines[index], (cst.FunctionDef, cst.ClassDef)) for index in moved):
        draft.todo(lines[first], "the optimizer must be made after the model is sharded")
        return
    draft.move_after([lines[index] for index in moved], lines[anchor], Order.OPTIMIZER)
    draft.note(lines[first], Grade.EXACT, "the optimizer is made after the model is sharded, with all that uses it")


def _bound(draft: Draft, line: cst.CSTNode) -> set[str]:
    found: set[str] = set()
    for statement in draft.module.inside(line, cst.Assign, cst.AnnAssign, cst.AugAssign):
        found |= {draft.code(target) for target in assigned_names(statement)}
    return found


def _read(draft: Draft, line: cst.CSTNode) -> set[str]:
    return {draft.code(node) for node in draft.module.inside(line, cst.Name, cst.Attribute)}
