"""Deletes the assignments that nothing uses any more after the edits of a module."""

from __future__ import annotations

import re

import libcst as cst
from libcst import metadata
from libcst.helpers import get_full_name_for_node

from .draft import Draft
from .edit import Edit, Rendering, Span
from .names import OWNERS
from .origin import CALL, LITERAL, NAME
from .wraps import Wrap

_WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*")


def sweep(draft: Draft, sources: frozenset[str]) -> None:
    """Delete assignments whose names nothing that is still shown uses, and repeat until quiet.

    Candidates are those that rules marked, what was merged into the wraps, and all that hold nothing but an old API.
    """
    draft.sweepable += _candidates(draft, sources)
    spoken = _spoken(draft)
    draft.sweepable = [one for one in draft.sweepable if not _targets(draft, one) & spoken]
    while True:
        rendering = draft.rendering()
        rendering.whole()
        dead = [one for one in draft.sweepable if one not in draft.deleted and _unused(draft, one, rendering)]
        if not dead:
            break
        for statement in dead:
            draft.delete(statement)
    fill_blocks(draft)


def _spoken(draft: Draft) -> set[str]:
    """The names that statements read which were written anew: what they hold is used, though no old text shows it."""
    texts = [piece for edit in draft.edits for piece in edit.pieces if isinstance(piece, str)]
    words = {word for text in texts if not text.lstrip().startswith("#") for word in _WORD.findall(text)}
    return words & {w.rpartition(".")[2] for wrap in draft.all_wraps for w in _held(wrap)}


def _held(wrap: Wrap) -> list[str]:
    """The texts of the optimizer and the scheduler that a wrap is given."""
    return [wrap.text(name) for name in ("optimizer", "lr_scheduler") if wrap.text(name).isidentifier()]


def _targets(draft: Draft, statement: cst.CSTNode) -> set[str]:
    if not isinstance(statement, cst.Assign):
        return set()
    return {draft.code(target.target) for target in statement.targets}


def _candidates(draft: Draft, sources: frozenset[str]) -> list[cst.CSTNode]:
    module = draft.module
    carried = [v.node for w in draft.all_wraps if not w.plan.refused for v in w.carriers if v.module is module]
    merged = {id(o.node) for node in carried for o in draft.origins(node)}
    for wrap in draft.all_wraps:
        taken = [wrap.args[name] for name in wrap.plan.claimed if name in wrap.args and not wrap.plan.refused]
        for value in taken:
            for origin in draft.flow.origins(value.module, value.node):
                if origin.kind == LITERAL or origin.name == "functools.partial":
                    merged.add(id(origin.node))
    found: list[cst.CSTNode] = []
    for statement in module.every(cst.Assign, cst.AnnAssign):
        assert isinstance(statement, (cst.Assign, cst.AnnAssign))
        given = statement.value
        if given is None or module.skips(statement):
            continue
        origins = draft.origins(given)
        owned = any(OWNERS[s](o.name) and o.kind in (NAME, CALL) for o in origins for s in sources)
        wrapped = any(o.node is w.call for o in origins for w in draft.all_wraps)
        if (owned and not wrapped) or any(id(o.node) in merged for o in origins):
            found.append(statement)
        elif isinstance(statement, cst.Assign):
            target = statement.targets[0].target
            if isinstance(target, cst.Subscript) and any(id(o.node) in merged for o in draft.origins(target.value)):
                found.append(statement)
    return found


def _unused(draft: Draft, statement: cst.CSTNode, rendering: Rendering) -> bool:
    module = draft.module
    targets = [t.target for t in statement.targets] if isinstance(statement, cst.Assign) else []
    if isinstance(statement, cst.AnnAssign):
        targets = [statement.target]
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        targets = [statement.name]
    if len(targets) != 1:
        return False
    target: cst.BaseExpression = targets[0]
    if isinstance(target, cst.Subscript):
        target = target.value
    if not isinstance(target, cst.Name):
        return False
    scope = module.scope(target if not isinstance(statement, (cst.FunctionDef, cst.ClassDef)) else statement)
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        scope = module.scope(module.parent(statement) or statement)
    if scope is None or (isinstance(scope, metadata.GlobalScope) and exported(draft, target.value)):
        return False
    used = False
    for assignment in scope[target.value]:
        for access in assignment.references:
            at = module.span(access.node).start
            if (
                not module.within(access.node, statement)
                and rendering.shows(at)
                and not _is_sibling_store(draft, access.node)
            ):
                return False
            used = True
    return used


def _is_sibling_store(draft: Draft, node: cst.CSTNode) -> bool:
    """Whether a use is only `name["key"] = value` in a statement that is itself marked."""
    try:
        statement = draft.module.statement(node)
    except LookupError:
        return False
    if statement not in draft.sweepable or not isinstance(statement, cst.Assign):
        return False
    return any(isinstance(t.target, cst.Subscript) and t.target.value is node for t in statement.targets)


def fill_blocks(draft: Draft) -> None:
    """Put `pass` where all statements of a block were deleted and nothing was inserted."""
    gone = [draft.module.line(s) for s in draft.deleted]
    for line in gone:
        block = draft.module.parent(line)
        if not isinstance(block, cst.IndentedBlock) or not all(one in gone for one in block.body):
            continue
        span = Span(draft.module.lines(block.body[0]).start, draft.module.lines(block.body[-1]).stop)
        inserted = any(
            e.inserts
            and span.holds(e.span)
            and any(str(p).strip() and not str(p).strip().startswith("#") for p in e.pieces)
            for e in draft.edits
        )
        if not inserted and not any(e.order == -99 and e.span.start == span.start for e in draft.edits):
            text = draft.module.indent(block.body[0]) + "pass" + draft.module.text.newline
            draft.edits.append(Edit(Span(span.start, span.start), (text,), order=-99))


def exported(draft: Draft, name: str) -> bool:
    """Whether another module of the run imports a name of this one, or `__all__` lists it."""
    if "__all__" in draft.module.text.masked and f'"{name}"' in draft.module.text.masked.replace("'", '"'):
        return True
    for module in draft.flow.program:
        if module is draft.module:
            continue
        for statement in module.every(cst.ImportFrom):
            if isinstance(statement.names, cst.ImportStar):
                continue
            for alias in statement.names:
                if get_full_name_for_node(alias.name) == name:
                    base = get_full_name_for_node(statement.module) if statement.module else ""
                    if draft.flow.program.find(base or "", module, len(statement.relative)) is draft.module:
                        return True
    return False
