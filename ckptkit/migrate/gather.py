"""Where a state dict is gathered: outside of rank guards, also those around the calls of its function."""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .early_return import gather_and_leave, guarded
from .grade import Grade
from .left_early import conditions, decorated, in_expression, left_before
from .plan import Line
from .ranks import asks_each_node, is_rank_test, rank_guard
from .syntax import assigned_names, operands


def gather(draft: Draft, call: cst.Call, pieces: Line, name: str, message: str) -> None:
    """Replace a call by what all ranks must run; under a rank guard it is made before the guard, under a name."""
    guard = rank_guard(draft, call)
    test = guarded(draft, call) if guard is None else ""
    if test:
        gather_and_leave(draft, call, test, pieces, name)
        draft.note(call, Grade.EXACT, f"{message}: all ranks call this, and those that do not write leave after it")
        return
    leave = left_before(draft, call) if guard is None else None
    if leave is not None:
        _gather_above(draft, call, leave, pieces, name, message)
        return
    if guard is None and decorated(draft, call):
        draft.replace(call, *pieces)
        draft.todo(call, "all ranks must run this, and the decorator lets one: gather the state where all call it")
        return
    if guard is None and in_expression(draft, call) is not None:
        name = draft.fresh(name, f"full_{name}")
        draft.replace(call, name)
        draft.before(draft.module.statement(call), (f"{name} = ", *pieces))
        draft.note(call, Grade.EXACT, f"{message}: all ranks take part, so it stands before what one rank evaluates")
        report_guarded_callers(draft, call)
        return
    if guard is None:
        draft.replace(call, *pieces)
        draft.note(call, Grade.EXACT, message)
        report_guarded_callers(draft, call)
        return
    statement = draft.module.statement(call)
    is_value = isinstance(statement, cst.Assign) and statement.value is call and len(statement.targets) == 1
    target = statement.targets[0].target if isinstance(statement, cst.Assign) else None
    if is_value and isinstance(target, cst.Name):
        name = target.value
        draft.delete(statement)
    else:
        name = draft.fresh(name, f"full_{name}")
        draft.replace(call, name)
    hoist(draft, guard, call, (f"{name} = ", *pieces))
    draft.note(call, Grade.EXACT, f"{message}: all ranks take part, so it stands before the rank guard")
    report_guarded_callers(draft, call)


def _gather_above(draft: Draft, call: cst.Call, leave: cst.If, pieces: Line, name: str, message: str) -> None:
    """Make a state dict above the line at which the other ranks leave the function."""
    asked = conditions(draft, leave, call)
    if asked is None:
        draft.replace(call, *pieces)
        draft.todo(call, "all ranks must run this, and others leave above: gather the state before they do")
        return
    name = draft.fresh(name, f"full_{name}")
    draft.replace(call, name)
    head = f"{name} = None\nif {' and '.join(asked)}:\n{draft.module.step()}" if asked else ""
    hoist(draft, leave, call, (f"{head}{name} = ", *pieces))
    draft.note(call, Grade.EXACT, f"{message}: all ranks take part, so it stands above where the others leave")
    report_guarded_callers(draft, call)


def of_one_rank(draft: Draft, node: cst.CSTNode) -> bool:
    """Whether only rank 0 needs what is gathered, under a guard or in a function that all ranks will call: not where
    a rank of each node writes.
    """
    guard = rank_guard(draft, node) or left_before(draft, node)
    asked = guard.test if guard is not None else in_expression(draft, node)
    test = draft.code(asked) if asked is not None else guarded(draft, node)
    return bool(test) and not asks_each_node(test)


def hoist(draft: Draft, guard: cst.If, call: cst.Call, line: Line) -> None:
    """Insert a line that all ranks run before a rank guard, in the place of a call in it.

    Several stand in the order of their calls, under what else the guard asks for (`step % 100 == 0 and ...`).
    """
    lines, edits = draft.hoisted.setdefault(id(guard), ({}, []))
    lines[draft.module.span(call).start] = line
    for edit in edits:
        draft.edits.remove(edit)
    block = [lines[at] for at in sorted(lines)]
    test = _rest(draft, guard)
    if test:
        block = [(f"if {test}:",), *((draft.module.step(), *one) for one in block)]
    draft.before(guard, *block)
    edits[:] = draft.edits[-1:]


def _rest(draft: Draft, guard: cst.If) -> str:
    """What a rank guard asks for besides the rank; empty where that cannot be taken apart, too."""
    parts = operands(guard.test, cst.And)
    rest = [part for part in parts if not is_rank_test(draft.code(part))]
    if len(rest) == len(parts):
        return ""
    return " and ".join(f"({draft.code(part)})" if part.lpar else draft.code(part) for part in rest)


def report_guarded_callers(draft: Draft, node: cst.CSTNode) -> None:
    """Leave a TODO at every call, under a rank guard, of the function in which all ranks must take part."""
    function = draft.module.function(node)
    if not isinstance(function, cst.FunctionDef):
        return
    for where, call in draft.flow.callers(draft.module, function):
        peer = draft.peers.get(id(where))
        if peer is None or where.skips(call):
            continue
        if rank_guard(peer, call) is not None or _is_of_one_rank(peer, call):
            peer.todo(
                call,
                f"all ranks must call {function.name.value}: it gathers from all of them; guard only what it writes",
                draft.rule,
            )


def _is_of_one_rank(draft: Draft, call: cst.Call) -> bool:
    """Whether a method is called on what only one rank makes: `ema = EMA(model) if rank == 0 else None`."""
    if not isinstance(call.func, cst.Attribute):
        return False
    owner, module = draft.code(call.func.value), draft.module
    for assign in module.every(cst.Assign):
        if any(draft.code(target) == owner for target in assigned_names(assign)):
            value = assign.value
            chosen = isinstance(value, cst.IfExp) and is_rank_test(draft.code(value.test))
            if chosen or (isinstance(value, cst.Call) and rank_guard(draft, assign) is not None):
                return True
    return False
