"""State dicts in functions that the other ranks have left before: `if not is_main(): return` above the gather."""

from __future__ import annotations

import re

import libcst as cst

from .draft import Draft
from .ranks import asks_others, asks_rank
from .syntax import assigned_names, operands

_COMPOUND = (cst.For, cst.While, cst.Try, cst.TryStar, cst.With, cst.Match, cst.Lambda, cst.CompFor, cst.ListComp,
             cst.SetComp, cst.DictComp, cst.GeneratorExp)  # fmt: skip


def left_before(draft: Draft, node: cst.CSTNode) -> cst.If | None:
    """The first `if rank != 0: return` (or `continue`, or `raise`) that stands above a node in a block around it."""
    found = None
    at: cst.CSTNode = node
    for holder in draft.module.ancestors(node):
        if isinstance(holder, (cst.IndentedBlock, cst.Module)):
            above = (one for one in _above(holder, at) if isinstance(one, cst.If) and _leaves(draft, one))
            found = next(above, found)
        if isinstance(holder, (cst.FunctionDef, cst.Lambda)):
            break
        at = holder
    return found


def conditions(draft: Draft, leave: cst.If, node: cst.CSTNode) -> list[str] | None:
    """What else is asked before a node is reached, so that it can be made above `leave`; None where it cannot: it is in
    a loop, or what it names gets its value in between.
    """
    module = draft.module
    block, asked, at = module.parent(leave), _rest(draft, leave), node
    tests: list[str] = []
    used = [node]
    for holder in module.ancestors(node):
        if holder is block:
            break
        if isinstance(holder, _COMPOUND):
            return None
        if isinstance(holder, (cst.If, cst.IfExp)) and at is not holder.test:
            test = draft.code(holder.test)
            tests.insert(0, test if at is holder.body else f"not ({test})")
            used.append(holder.test)
        at = holder
    start, stop = module.span(leave).stop, module.span(node).start
    names = {name.value for one in used for name in module.inside(one, cst.Name)}
    stores = module.inside(
        module.function(node) or module.tree, cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.With, cst.For
    )
    for store in stores:
        if start <= module.span(store).start < stop and not module.within(node, store):
            targets = assigned_names(store) if isinstance(store, cst.Assign) else module.inside(store, cst.Name)
            if any(name.value in names for target in targets for name in module.inside(target, cst.Name)):
                return None
    return asked + tests


def in_expression(draft: Draft, node: cst.CSTNode) -> cst.BaseExpression | None:
    """The rank test of `x if rank == 0 else y` or `rank == 0 and x` around a node."""
    at: cst.CSTNode = node
    for holder in draft.module.ancestors(node):
        if isinstance(holder, (cst.BaseStatement, cst.BaseSmallStatement, cst.Lambda, cst.BaseComp)):
            break
        if isinstance(holder, cst.IfExp) and (
            (at is holder.body and asks_rank(draft, holder.test))
            or (at is holder.orelse and asks_others(draft, holder.test))
        ):
            return holder.test
        if isinstance(holder, cst.BooleanOperation) and isinstance(holder.operator, cst.And):
            left = holder.left
            if at is holder.right and asks_rank(draft, left):
                return left
        at = holder
    return None


def decorated(draft: Draft, node: cst.CSTNode) -> bool:
    """Whether the function of a node is for one rank by its decorator: `@rank_zero_only`, `@main_process`."""
    function = draft.module.function(node)
    if not isinstance(function, cst.FunctionDef):
        return False
    texts = [draft.code(one.decorator).lower() for one in function.decorators]
    return any(re.search(r"rank_?(?:zero|0)|main_process|master|is_main", text) for text in texts)


def _above(block: cst.IndentedBlock | cst.Module, at: cst.CSTNode) -> list[cst.CSTNode]:
    body: list[cst.CSTNode] = [*block.body]
    return body[: next((index for index, one in enumerate(body) if one is at), 0)]


def _leaves(draft: Draft, node: cst.If) -> bool:
    if node.orelse is not None or not any(asks_others(draft, p) for p in operands(node.test, cst.Or)):
        return False
    last = node.body.body[-1]
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, (cst.Return, cst.Continue, cst.Raise))


def _rest(draft: Draft, leave: cst.If) -> list[str]:
    """What the test above asks for besides the rank, the other way round."""
    return [f"not ({draft.code(part)})" for part in operands(leave.test, cst.Or) if not asks_others(draft, part)]
