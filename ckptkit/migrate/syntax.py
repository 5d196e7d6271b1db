"""Questions about single statements and calls: arguments, targets, returns, and when an assignment holds."""

from __future__ import annotations

import libcst as cst

from .module import Module


def returns(module: Module, function: cst.FunctionDef) -> list[cst.Return]:
    """The return statements of a function, without those of functions inside it."""
    return [r for r in module.every(cst.Return) if module.function(r) is function]


def argument_of(call: cst.Call, positional: list[str], name: str) -> cst.BaseExpression | None:
    """The argument that a call gives for a parameter, by keyword or position; None when it gives none."""
    for argument in call.args:
        if argument.keyword is not None and argument.keyword.value == name:
            return argument.value
    if name not in positional:
        return None
    index = positional.index(name)
    leading = []
    for argument in call.args:
        if argument.keyword is not None or argument.star:
            break
        leading.append(argument)
    return leading[index].value if index < len(leading) else None


def operands(test: cst.BaseExpression, kind: type[cst.And] | type[cst.Or]) -> list[cst.BaseExpression]:
    """What the `and`s (or the `or`s) of a condition join; one in parentheses is one."""
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, kind) and not test.lpar:
        return [*operands(test.left, kind), *operands(test.right, kind)]
    return [test]


def assigned_names(statement: cst.CSTNode) -> list[cst.BaseExpression]:
    """The targets of an assignment statement, tuples taken apart."""
    if isinstance(statement, cst.Assign):
        targets: list[cst.BaseExpression] = [target.target for target in statement.targets]
    elif isinstance(statement, (cst.AnnAssign, cst.AugAssign)):
        targets = [statement.target]
    else:
        return []
    flat: list[cst.BaseExpression] = []
    while targets:
        target = targets.pop(0)
        if isinstance(target, (cst.Tuple, cst.List)):
            targets = [element.value for element in target.elements] + targets
        else:
            flat.append(target)
    return flat


def is_store(module: Module, node: cst.CSTNode) -> bool:
    """Whether an expression is assigned to."""
    at = node
    for holder in module.ancestors(node):
        if isinstance(holder, cst.AssignTarget):
            return True
        if isinstance(holder, (cst.AnnAssign, cst.AugAssign)):
            return holder.target is at
        if not isinstance(holder, (cst.Element, cst.Tuple, cst.List)):
            return False
        at = holder
    return False


def effect(module: Module, node: cst.CSTNode) -> int:
    """Offset from which on an assignment holds: behind its statement, or in the body of a loop or with."""
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        return module.span(node).start
    kinds = (cst.BaseSmallStatement, cst.BaseCompoundStatement, cst.NamedExpr)
    holder = next((a for a in module.ancestors(node) if isinstance(a, kinds)), None)
    if isinstance(holder, (cst.BaseSmallStatement, cst.NamedExpr)):
        return module.span(holder).stop
    return module.span(node).stop


def surely_ran(module: Module, node: cst.CSTNode, use: cst.CSTNode) -> bool:
    """Whether an assignment above a use ran on every way to it: its block holds the use (a `with` is no branch)."""
    try:
        line = node if isinstance(node, (cst.FunctionDef, cst.ClassDef)) else module.line(node)
    except LookupError:
        return False
    block = module.parent(line)
    while isinstance(block, cst.IndentedBlock) and isinstance(module.parent(block), cst.With):
        if module.within(use, block):
            return True
        block = module.parent(module.parent(block))  # type: ignore[arg-type]
    return block is not None and module.within(use, block)
