"""Functions that gather a state and are called on one rank only: all ranks call them, and the others leave early."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from .draft import Draft
from .plan import Line
from .ranks import asks_each_node, is_rank_test, rank_guard
from .syntax import operands

_FAR = 1 << 40
_Chain = list[cst.BaseStatement]  # from a guard down to the line of a call, each in the body of the one before


@dataclass(frozen=True, slots=True)
class _Caller:
    draft: Draft
    call: cst.Call
    guard: cst.If


def guarded(draft: Draft, node: cst.CSTNode) -> str:
    """The rank test around all calls of the function of a node, as that function may ask it; else an empty string.

    Empty as well where the calls cannot be taken out of their guards, or `node` cannot run on all ranks before the
    others leave.
    """
    function = draft.module.function(node)
    if not isinstance(function, cst.FunctionDef) or _line_in(draft, function, node) is None:
        return ""
    callers = _callers(draft, function)
    if not callers or not all(_way_out(one) for one in callers):
        return ""
    tests = {one.draft.code(_parts(one)[0][0]) for one in callers}
    if len(tests) != 1:
        return ""
    test = tests.pop()
    if all(_is_own(one) for one in callers):
        return test
    return "" if asks_each_node(test) else f"{draft.need_module('torch.distributed', 'dist')}.get_rank() == 0"


def gather_and_leave(draft: Draft, call: cst.Call, test: str, pieces: Line, name: str) -> None:
    """Replace a call by what all ranks run, take the calls of its function out of their guards, and return after it
    where `test` (see `guarded`) does not hold.
    """
    function = draft.module.function(call)
    assert isinstance(function, cst.FunctionDef)
    line = _line_in(draft, function, call)
    assert line is not None
    stays = isinstance(line.body[0], (cst.Assign, cst.AnnAssign))
    if stays:
        draft.replace(call, *pieces)
    else:
        name = draft.fresh(name, f"full_{name}")
        draft.replace(call, name)
        draft.before(line, (f"{name} = ", *pieces), order=draft.module.span(call).start - _FAR)  # as the calls stand
    old = draft.leaves.get(id(function))
    if old is None:
        for caller in _callers(draft, function):
            _take_out(caller)
    else:
        at = draft.module.lines(line)
        if old.span.start >= (at.stop if stays else at.start):
            return
        draft.edits.remove(old)
    lines = [(f"if {_negated(test)}:",), (f"{draft.module.step()}return",)]
    if stays:
        draft.after(line, *lines, order=1)
    else:
        draft.before(line, *lines, order=1)
    draft.leaves[id(function)] = draft.edits[-1]


def _line_in(draft: Draft, function: cst.FunctionDef, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
    """The line of a function's body that holds a node, if only assignments stand above it: all ranks may run those."""
    for line in function.body.body:
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
            return None
        if draft.module.within(node, line):
            return line
        small = line.body[0]
        text = isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)
        if not text and not isinstance(small, (cst.Assign, cst.AnnAssign)):
            return None
    return None


def _callers(draft: Draft, function: cst.FunctionDef) -> list[_Caller]:
    """All calls of a function with their guards; none if one of them is not guarded."""
    found = []
    for where, call in draft.flow.callers(draft.module, function):
        peer = draft.peers.get(id(where))
        guard = rank_guard(peer, call) if peer is not None else None
        if peer is None or guard is None or where.skips(call):
            return []
        found.append(_Caller(peer, call, guard))
    return found


def _parts(caller: _Caller) -> tuple[list[cst.BaseExpression], list[cst.BaseExpression]]:
    """The operands of the `and`s of a guard: those that ask for the rank, and the rest."""
    parts = operands(caller.guard.test, cst.And)
    ranks = [part for part in parts if is_rank_test(caller.draft.code(part))]
    return ranks, [part for part in parts if part not in ranks]


def _is_own(caller: _Caller) -> bool:
    """Whether a method calls another of its object, and the rank test only asks that object."""
    module, func, test = caller.draft.module, caller.call.func, _parts(caller)[0][0]
    names = [n for n in module.inside(test, cst.Name) if not _is_attribute(caller.draft, n)]
    mine = isinstance(func, cst.Attribute) and isinstance(func.value, cst.Name) and func.value.value == "self"
    return mine and bool(names) and all(name.value == "self" for name in names)


def _is_attribute(draft: Draft, name: cst.Name) -> bool:
    parent = draft.module.parent(name)
    return isinstance(parent, cst.Attribute) and parent.attr is name


def _chain(caller: _Caller) -> _Chain | None:
    """The guard, the ifs in it around the call, and the line of the call; None where anything else is between."""
    module = caller.draft.module
    if not isinstance(module.parent(caller.call), cst.Expr):
        return None
    line = module.line(caller.call)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return None
    chain: _Chain = [line]
    while chain[0] is not caller.guard:
        block = module.parent(chain[0])
        holder = module.parent(block) if block is not None else None
        if not isinstance(holder, cst.If) or holder.body is not block or holder.orelse is not None:
            return None
        chain.insert(0, holder)
    return None if isinstance(module.parent(caller.guard), cst.If) else chain


def _way_out(caller: _Caller) -> bool:
    """Whether a call can be taken out of its guard: it is all that the guard holds, or the last of it."""
    ranks, _ = _parts(caller)
    chain = _chain(caller)
    if chain is None or len(ranks) != 1:
        return False
    blocks = [one.body.body for one in chain[:-1]]  # type: ignore[attr-defined]
    if all(len(block) == 1 for block in blocks):
        return True
    if any(block[-1] is not one for block, one in zip(blocks, chain[1:], strict=True)):
        return False
    module = caller.draft.module
    tests = [one.test for one in chain[1:-1] if isinstance(one, cst.If)]
    asked = {name.value for part in [*tests, caller.call] for name in module.inside(part, cst.Name)}
    stores = module.inside(caller.guard, cst.AssignTarget, cst.NamedExpr, cst.AugAssign, cst.AnnAssign, cst.AsName)
    targets = [one.name if isinstance(one, cst.AsName) else getattr(one, "target", one) for one in stores]
    return not any(name.value in asked for target in targets for name in module.inside(target, cst.Name))


def _take_out(caller: _Caller) -> None:
    draft, chain = caller.draft, _chain(caller)
    assert chain is not None
    _, rest = _parts(caller)
    tests = [" and ".join(f"({draft.code(part)})" if part.lpar else draft.code(part) for part in rest)] if rest else []
    if all(len(one.body.body) == 1 for one in chain[:-1]):  # type: ignore[attr-defined]
        if tests:
            draft.replace(caller.guard.test, tests[0])
        else:
            draft.unwrap(caller.guard)
        return
    step = draft.module.step()
    tests += [draft.code(one.test) for one in chain[1:-1]]  # type: ignore[attr-defined]
    lines: list[Line] = [(f"{step * depth}if {test}:",) for depth, test in enumerate(tests)]
    lines.append((step * len(tests), *draft.module.quote(caller.call)))
    draft.after(caller.guard, *lines)
    emptied = chain[-1]
    for holder in reversed(chain[1:-1]):
        if len(holder.body.body) > 1:  # type: ignore[attr-defined]
            break
        emptied = holder
    draft.replace_span(draft.module.lines(emptied))


def _negated(test: str) -> str:
    if test.endswith("== 0") and test.count("==") == 1:
        return test.removesuffix("== 0") + "!= 0"
    if test.startswith("not "):
        return test.removeprefix("not ")
    return f"not {test}" if " " not in test else f"not ({test})"
