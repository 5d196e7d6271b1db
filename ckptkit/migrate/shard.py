"""Writes a wrap's plan into the draft: the wrapping call becomes `fully_shard` calls, loops and the steps around
them.
"""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .edit import Dedent, Piece, Span
from .module import Module
from .plan import MODEL, UNIT, Line, Order
from .wraps import Wrap

WIDTH = 110
_ONCE = (
    cst.Lambda,
    cst.GeneratorExp,
    cst.ListComp,
    cst.SetComp,
    cst.DictComp,
    cst.IfExp,
    cst.BooleanOperation,
    cst.While,
)


def obstacle(module: Module, wrap: Wrap, wraps: list[Wrap]) -> str:
    """Why a plan that needs statements cannot be placed at its call; empty where it can."""
    if wrap.plan.is_call or wrap.source == "deepspeed" or _conditional(module, wrap.call) is not None:
        return ""  # the statement of deepspeed.initialize is written by a rule of its own
    statement = module.statement(wrap.call)
    at: cst.CSTNode = wrap.call
    for holder in module.ancestors(wrap.call):
        if isinstance(holder, _ONCE) and not (isinstance(holder, cst.IfExp) and holder.test is at):
            return (
                "the wrap is evaluated conditionally or repeatedly inside an expression; give it a statement of its own"
            )
        if isinstance(holder, cst.If) and isinstance(module.parent(holder), cst.If) and holder.test is at:
            return "the wrap stands in the test of an elif; give it a statement of its own"
        if holder is statement:
            break
        at = holder
    start = module.span(wrap.call).start
    subject = wrap.subject
    if subject is not None and not _is_reference(subject.node):
        for call in module.every(cst.Call):
            runs_before = module.within(call, statement) and module.span(call).stop <= start
            if runs_before and not any(module.within(call, w.call) or module.within(w.call, call) for w in wraps):
                return "the model is built inside an expression after other calls; give it a statement of its own"
    return ""


def write(draft: Draft, wrap: Wrap) -> None:
    """Write one wrap. Call for inner wraps before outer ones, after all rules have rewritten."""
    plan, call = wrap.plan, wrap.call
    if plan.refused:
        for rule, reason in plan.refusals:
            draft.todo(call, reason, rule)
        return
    for name in sorted(wrap.args.keys() - plan.claimed - {"module", "model"}):
        draft.todo(call, f"the argument {name}={wrap.text(name)} is not carried over", "leftover")
    if plan.written:
        return
    subject = wrap.subject
    assert subject is not None  # a wrap without a model was refused
    if plan.merged:
        draft.replace(call, *draft.module.quote(subject.node))
        return
    if plan.is_call:
        _write_call(draft, wrap, subject.node)
        return
    statement = draft.module.statement(call)
    conditional = _conditional(draft.module, call)
    if conditional is not None:
        _write_conditional(draft, wrap, conditional)
        return
    if isinstance(statement, (cst.Assign, cst.AnnAssign)) and statement.value is call:
        target = _single_target(statement)
        if target is not None:
            lines = _assigned(draft, wrap, draft.module.code(target), _prefix(draft, statement))
            draft.statement_becomes(statement, _with_comments(draft, statement, lines))
            return
    if isinstance(statement, cst.Return) and statement.value is call:
        model, lines = _named(draft, wrap)
        draft.statement_becomes(statement, _with_comments(draft, statement, [*lines, (f"return {model}",)]))
        return
    model, lines = _named(draft, wrap)
    if isinstance(statement, cst.Expr) and statement.value is call:
        draft.statement_becomes(statement, _with_comments(draft, statement, lines))
        return
    draft.before(call, *lines)
    draft.replace(call, model)


def sharded(draft: Draft, wrap: Wrap, model: str) -> list[Line]:
    """All statements from Order.DEVICE on that turn the model of this name into a sharded one; BUILD is not among
    them.
    """
    plan = wrap.plan
    steps = sorted(plan.steps, key=lambda step: step.order)
    lines: list[Line] = [line for step in steps if step.order < Order.SHARD for line in step.lines]
    children, root = {**plan.kwargs, **plan.child_kwargs}, {**plan.kwargs, **plan.root_kwargs}
    call = draft.need("torch.distributed.fsdp", "fully_shard")
    if plan.units or plan.policy is not None:
        for name, wish in plan.shared.items():
            if name in plan.kwargs:
                text = "".join(p if isinstance(p, str) else draft.text(p) for p in plan.kwargs[name])
                local = draft.throwaway(*wish, value=text)
                lines.append((f"{local} = ", *plan.kwargs[name]))
                children[name] = root[name] = (local,)
    calls = _calls(draft, wrap, call, children, root)
    lines += calls
    for copy in plan.copies:
        lines += [_fill(line, MODEL, copy) for line in calls]
    lines += [line for step in steps if step.order > Order.SHARD for line in step.lines]
    return [_fill(line, MODEL, model) for line in lines]


def _calls(draft: Draft, wrap: Wrap, call: str, children: dict[str, Line], root: dict[str, Line]) -> list[Line]:
    """The loop or policy over the submodules, and the call for the model itself."""
    plan = wrap.plan
    base = len(draft.inner_indent(wrap.call).expandtabs(4))
    lines: list[Line] = []
    if plan.units:
        unit = draft.throwaway("module", "submodule", "unit")
        step = draft.module.step()
        lines.append((f"for {unit} in reversed(list({MODEL}.modules())[1:]):",))
        word = "if"
        for one in plan.units:
            condition = one.condition
            if plan.guards and any(isinstance(piece, str) and " or " in piece for piece in condition):
                condition = ("(", *condition, ")")
            conditions = [*plan.guards, *([condition] if condition else [])]
            test = _joined(conditions, " and ")
            inner = step
            if test:
                lines.append((f"{step}{word} ", *_fill(test, UNIT, unit), ":"))
                inner, word = step * 2, "elif"
            lines.append((inner, *_call(call, unit, {**children, **one.kwargs}, inner, step, base=base)))
    if plan.policy is not None:
        ignored: dict[str, Line] = {"ignored": plan.ignored} if plan.ignored is not None else {}
        if plan.units:  # the units are BatchNorm layers: already groups of their own
            condition = _fill(_joined([one.condition for one in plan.units], " or "), UNIT, "m")
            taken: Line = (f"{{m for m in {MODEL}.modules() if ", *condition, "}")
            ignored["ignored"] = (*taken, " | ", *plan.ignored) if plan.ignored is not None else taken
        step = draft.module.step()
        lines.append(
            _call(plan.walker[0], MODEL, {plan.walker[1]: plan.policy, **ignored, **children}, "", step, base=base)
        )
    lines.append(_call(call, MODEL, root, "", draft.module.step(), base=base))
    return lines


def _write_call(draft: Draft, wrap: Wrap, subject: cst.BaseExpression) -> None:
    module, call = draft.module, wrap.call
    name = draft.need("torch.distributed.fsdp", "fully_shard")
    kwargs = {**wrap.plan.kwargs, **wrap.plan.root_kwargs}
    statement = module.statement(call)
    base = len(draft.inner_indent(statement).expandtabs(4))
    pieces = _call(name, None, kwargs, "", module.step(), module.quote(subject), base=base)
    comments = module.comments_in(call, [p for p in pieces if isinstance(p, Span)])
    if comments:
        draft.before(call, *((comment,) for comment in comments))
    if isinstance(statement, cst.Assign) and statement.value is call:
        target = _single_target(statement)
        if target is not None and _is_reference(subject) and module.code(target) == module.code(subject):
            draft.replace(statement, *draft.join([pieces], draft.inner_indent(statement)))
            return
    draft.replace(call, *draft.join([pieces], draft.inner_indent(statement)))


def _assigned(draft: Draft, wrap: Wrap, target: str, prefix: str) -> list[Line]:
    """Lines for `target = FSDP(subject, ...)`."""
    subject = wrap.subject.node  # type: ignore[union-attr]
    text = draft.module.code(subject)
    if _is_reference(subject):
        lines = sharded(draft, wrap, text)
        return lines if target == text else [*lines, (f"{prefix} = {text}",)]
    steps = sharded(draft, wrap, target)
    early = sum(len(step.lines) for step in wrap.plan.steps if step.order < Order.BUILD)
    return [*steps[:early], (f"{prefix} = ", *draft.module.quote(subject)), *steps[early:]]


def _named(draft: Draft, wrap: Wrap) -> tuple[str, list[Line]]:
    """A name for the model, and the lines that shard it under this name."""
    subject = wrap.subject.node  # type: ignore[union-attr]
    if _is_reference(subject):
        name = draft.module.code(subject)
    else:
        name = draft.fresh("model", "sharded_model")
    return name, _assigned(draft, wrap, name, name)


def _conditional(module: Module, call: cst.Call) -> cst.IfExp | None:
    """The conditional expression of `target = FSDP(..) if test else other` (or `return ...`) that a call is a branch
    of.
    """
    holder = module.parent(call)
    if not isinstance(holder, cst.IfExp) or holder.test is call:
        return None
    statement = module.parent(holder)
    if isinstance(statement, cst.Return):
        return holder
    if isinstance(statement, (cst.Assign, cst.AnnAssign)) and _single_target(statement) is not None:
        return holder
    return None


def _write_conditional(draft: Draft, wrap: Wrap, choice: cst.IfExp) -> None:
    module = draft.module
    statement = module.statement(choice)
    if any(edit.span == module.span(statement) for edit in draft.edits):
        return  # the other branch was a wrap too and has written both
    step = module.step()
    target = _single_target(statement) if isinstance(statement, (cst.Assign, cst.AnnAssign)) else None

    def branch(node: cst.BaseExpression) -> list[Line]:
        mine = next((w for w in draft.wraps if w.call is node and not w.plan.refused), None)
        if target is None:
            if mine is None:
                return [("return ", *module.quote(node))]
            model, lines = _named(draft, mine)
            return [*lines, (f"return {model}",)]
        if mine is not None and not mine.plan.is_call:
            return _assigned(draft, mine, module.code(target), _prefix(draft, statement))
        if module.code(node) == module.code(target):
            return []
        return [(f"{_prefix(draft, statement)} = ", *module.quote(node))]

    body, orelse = branch(choice.body), branch(choice.orelse)
    test = module.quote(choice.test)
    both: list[Line] = []
    while body and orelse and _text(draft, body[-1]) == _text(draft, orelse[-1]):
        both.insert(0, body.pop())
        orelse.pop()
    if not body:
        body, orelse, test = orelse, [], negated(module, choice.test)
    lines: list[Line] = [("if ", *test, ":"), *_indented(body, step)] if body else []
    if orelse:
        lines += [("else:",), *_indented(orelse, step)]
    lines += both
    draft.explode(statement)
    draft.statement_becomes(statement, _with_comments(draft, statement, lines))


def _text(draft: Draft, line: Line) -> str:
    return "".join(piece if isinstance(piece, str) else draft.text(piece) for piece in line)


def negated(module: Module, test: cst.BaseExpression) -> Line:
    """Pieces of `not test`, without needless parentheses."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return module.quote(test.expression)
    simple = isinstance(test, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) or bool(test.lpar)
    return ("not ", *module.quote(test)) if simple else ("not (", *module.quote(test), ")")


def _indented(lines: list[Line], step: str) -> list[Line]:
    return [tuple(p.replace("\n", "\n" + step) if isinstance(p, str) else p for p in (step, *line)) for line in lines]


def _with_comments(draft: Draft, statement: cst.CSTNode, lines: list[Line]) -> list[Line]:
    kept = [piece for line in lines for piece in line if isinstance(piece, Span)]
    comments = draft.module.comments_in(statement, kept)
    return [*((comment,) for comment in comments), *lines]


def _prefix(draft: Draft, statement: cst.CSTNode) -> str:
    """The text of an assignment's target, its annotation included."""
    if isinstance(statement, cst.AnnAssign):
        return f"{draft.code(statement.target)}: {draft.code(statement.annotation.annotation)}"
    return draft.code(statement.targets[0].target)  # type: ignore[attr-defined]


def _single_target(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """The target of `name = ...` or `a.b = ...`; None for several targets, tuples and subscripts."""
    if isinstance(statement, cst.AnnAssign):
        target: cst.BaseExpression = statement.target
    elif isinstance(statement, cst.Assign) and len(statement.targets) == 1:
        target = statement.targets[0].target
    else:
        return None
    return target if _is_reference(target) else None


def _is_reference(node: cst.BaseExpression) -> bool:
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _call(
    name: str, model: str | None, kwargs: dict[str, Line], indent: str, step: str, subject: Line = (), *, base: int = 0
) -> Line:
    """`name(model, key=value, ...)`, broken into one argument a line where it would be long.

    `indent` is what the text itself is indented by, `base` the width of the indentation that its place will add.
    """
    arguments: list[Line] = [(model,) if model is not None else subject]
    for name_of, (head, *rest) in kwargs.items():
        key = name_of if name_of == "**" else f"{name_of}="
        arguments.append((f"{key}{head}", *rest) if isinstance(head, str) else (key, head, *rest))
    width = sum(map(_width, arguments))
    if base + len(indent) + len(name) + width + 2 * len(arguments) <= WIDTH or len(arguments) == 1:
        return (f"{name}(", *_joined(arguments, ", "), ")")
    inner = f"\n{indent}{step}"
    broken: list[Piece] = [f"{name}("]
    for argument in arguments:
        first, last = argument[0], argument[-1]
        long = base + len(indent) + len(step) + _width(argument) > WIDTH + 8
        if any("\n" in piece for piece in argument if isinstance(piece, str)):  # broken already: one level deeper
            argument = tuple(piece.replace("\n", inner) if isinstance(piece, str) else piece for piece in argument)
        elif long and isinstance(first, str) and isinstance(last, str) and "(" in first and last.endswith(")"):
            at = first.index("(") + 1
            body: Line = (first[at:], *argument[1:-1], last[:-1]) if len(argument) > 1 else (first[at:-1],)
            argument = (first[:at], f"{inner}{step}", *body, f"{inner})")
        broken += [inner, *argument, ","]
    return (*broken, f"\n{indent})")


def _width(line: Line) -> int:
    return sum(len(piece) if isinstance(piece, str) else _span(piece).stop - _span(piece).start for piece in line)


def _span(piece: Span | Dedent) -> Span:
    return piece if isinstance(piece, Span) else piece.span


def _joined(lines: list[Line], separator: str) -> Line:
    pieces: list[Piece] = []
    for index, line in enumerate(lines):
        if index:
            pieces.append(separator)
        pieces += line
    return tuple(pieces)


def _fill(line: Line, placeholder: str, text: str) -> Line:
    return tuple(piece.replace(placeholder, text) if isinstance(piece, str) else piece for piece in line)
