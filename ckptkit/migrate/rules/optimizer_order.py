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
from ..grade import Grade
from ..plan import Order
from ..state import STATE, options
from ..syntax import argument_of, assigned_names

SOURCES = ("fsdp1", "ddp", "deepspeed")


def rewrite(draft: Draft) -> None:
    """Move optimizers of every block behind its wraps."""
    for block in (draft.module.tree, *draft.module.every(cst.IndentedBlock)):
        _reorder(draft, list(block.body))  # type: ignore[attr-defined]


def _reorder(draft: Draft, lines: list[cst.CSTNode]) -> None:
    sharded = [(i, event) for i, line in enumerate(lines) for event in shards(draft, line)]
    if not sharded:
        return
    done: set[int] = set()
    for index, line in enumerate(lines):
        for event in [] if index in done else [*makes_optimizer(draft, line), *_engine_parameters(draft, line)]:
            lists = {i: _gathering(draft, lines, index, wrap) for i, wrap in sharded}
            mine = [i for i, wrap in sharded if _same_model(event, wrap) or any(at < i for at in lists[i])]
            later = [i for i in mine if i > index]
            anchor = max(later or mine, default=-1)
            gathered = [at for at in lists.get(anchor, ()) if at < anchor and at not in done]
            if later or gathered:
                models = event.models | dict(sharded)[anchor].models
                done |= _move(draft, lines, [*gathered, *([index] if later else [])], anchor, done, models)
                break


def _same_model(optimizer: Event, wrap: Event) -> bool:
    return bool(optimizer.models & wrap.models)


def _engine_parameters(draft: Draft, line: cst.CSTNode) -> list[Event]:
    """deepspeed.initialize makes an optimizer of its config from the parameters that it is given."""
    found = []
    for wrap in draft.wraps:
        subject = wrap.subject
        engine = wrap.source == "deepspeed" and not wrap.plan.refused and subject is not None
        here = draft.module.within(wrap.call, line) and not isinstance(line, (cst.FunctionDef, cst.ClassDef))
        if engine and here and wrap.text("optimizer") in ("", "None"):
            found.append(Event(frozenset((draft.code(subject.node),))))  # type: ignore[union-attr]
    return found


def _gathering(draft: Draft, lines: list[cst.CSTNode], index: int, event: Event) -> list[int]:
    """The lines above an optimizer that put the model's parameters into what it is made of (lists, groups)."""
    holding: set[str] = set()
    candidates = []
    for at in range(index):
        if isinstance(lines[at], (cst.FunctionDef, cst.ClassDef)):
            continue
        takes = any(
            isinstance(c.func, cst.Attribute)
            and c.func.attr.value in ("parameters", "named_parameters")
            and draft.code(c.func.value) in event.models
            for c in draft.module.inside(lines[at], cst.Call)
        )
        if takes or holding & _read(draft, lines[at]):
            holding |= _filled(draft, lines[at])
            candidates.append(at)
    needed = _read(draft, lines[index])
    found = []
    for at in reversed(candidates):
        if _filled(draft, lines[at]) & needed and not makes_optimizer(draft, lines[at]):
            found.append(at)
            needed |= _read(draft, lines[at])
    return sorted(found)


def _filled(draft: Draft, line: cst.CSTNode) -> set[str]:
    """Names that a line binds, or fills by methods of lists and dicts."""
    names = {name for name in _bound(draft, line) if "." not in name or name.startswith("self.")}
    for call in draft.module.inside(line, cst.Call):
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value in ("append", "extend", "add", "update", "insert"):
            names.add(draft.code(func.value).split("[")[0])
    return names


def _move(
    draft: Draft, lines: list[cst.CSTNode], moved: list[int], anchor: int, done: set[int], models: frozenset[str]
) -> set[int]:
    """Move some lines and what depends on them, up to the anchor, behind the anchor; which were moved.

    Lines that bind anew what the moved ones read move too, but for those of the models, which are read after sharding.
    """
    first = moved[-1]
    names = {name for index in moved for name in _bound(draft, lines[index]) | _filled(draft, lines[index])}
    start, known = moved[0] + 1, 0
    while known != len(moved):
        known = len(moved)
        for index in range(start, anchor):
            if index in moved or index in done:
                continue
            if names & _read(draft, lines[index]) or _renews(draft, lines, index, moved) - models:
                moved.append(index)
                names |= _bound(draft, lines[index])
    moved.sort()
    handed_over = any(w.source == "deepspeed" and draft.module.within(w.call, lines[anchor]) for w in draft.wraps)
    rebound = [call for w in draft.all_wraps for call in w.facts.get("rebound", ())]  # type: ignore[attr-defined]
    if any(id(call) in rebound for i in moved for call in draft.module.inside(lines[i], cst.Call)):
        return set()  # the rule optimizer-rebound sees to it
    if names & _read(draft, lines[anchor]) and not handed_over:
        draft.todo(
            lines[first], "the optimizer must be made after the model is sharded, but the sharding statement uses it"
        )
        return set()
    if any(isinstance(lines[index], (cst.FunctionDef, cst.ClassDef)) for index in moved):
        draft.todo(lines[first], "the optimizer must be made after the model is sharded")
        return set()
    for index in moved:
        _load_sharded(draft, lines[index], models)
    draft.move_after([lines[index] for index in moved], lines[anchor], Order.OPTIMIZER)
    draft.note(lines[first], Grade.EXACT, "the optimizer is made after the model is sharded, with all that uses it")
    return set(moved)


def _load_sharded(draft: Draft, line: cst.CSTNode, models: frozenset[str]) -> None:
    """Weights that a moved line loads (`if resume: ...`) come to a model in shards now."""
    for call in draft.module.inside(line, cst.Call):
        func = call.func
        loads = isinstance(func, cst.Attribute) and func.attr.value == "load_state_dict" and bool(call.args)
        if not loads or draft.code(func.value) not in models:  # type: ignore[attr-defined]
            continue
        strict = argument_of(call, ["state_dict", "strict"], "strict")
        extra = [f"strict={draft.code(strict)}"] if strict is not None and draft.code(strict) != "True" else []
        quote, load = draft.module.quote, draft.need(STATE, "set_model_state_dict")
        pieces = (f"{load}(", *quote(func.value), ", ", *quote(call.args[0].value))  # type: ignore[attr-defined]
        draft.replace(call, *pieces, *options(draft, ["full_state_dict=True", *extra]), ")")
        draft.note(call, Grade.EXACT, "load_state_dict becomes set_model_state_dict, as it comes after the sharding")


def _renews(draft: Draft, lines: list[cst.CSTNode], index: int, moved: list[int]) -> set[str]:
    """The names that a line binds anew and that a line above it, which will come after it, reads."""
    if isinstance(lines[index], (cst.FunctionDef, cst.ClassDef)):
        return set()
    needed = {name for above in moved if above < index for name in _read(draft, lines[above])}
    return _bound(draft, lines[index]) & needed


def _bound(draft: Draft, line: cst.CSTNode) -> set[str]:
    found: set[str] = set()
    for statement in draft.module.inside(line, cst.Assign, cst.AnnAssign, cst.AugAssign):
        found |= {draft.code(target) for target in assigned_names(statement)}
    return found


def _read(draft: Draft, line: cst.CSTNode) -> set[str]:
    return {draft.code(node) for node in draft.module.inside(line, cst.Name, cst.Attribute)}
