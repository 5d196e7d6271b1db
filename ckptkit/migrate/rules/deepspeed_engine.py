"""engine.backward and engine.step become the steps that they hide: division, clipping, update, zeroing, schedule.

What: `engine.backward(loss)` becomes `(loss / steps).backward()`; `engine.step()` becomes the clipping, the
optimizer's step, the scheduler's, and `zero_grad()`, at accumulation boundaries only where gradients are accumulated.

Why: DeepSpeed divides the loss by gradient_accumulation_steps, and **clips at 1.0 when the config does not say
gradient_clipping** (0.19.8 runtime/constants.py GRADIENT_CLIPPING_DEFAULT); only `"gradient_clipping": 0` switches it
off. It steps the scheduler once an update.

Before::

    engine.backward(loss)
    engine.step()

After::

    (loss / 4).backward()
    micro_steps += 1
    if micro_steps % 4 == 0:
        torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

In numbers: equal to the last bit in fp32, if every line is there.

Known limits: `engine.step()` and `engine.backward()` inside expressions are left with a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..ds_setup import Setup, setup_at
from ..grade import Grade
from ..plan import Line
from ..syntax import argument_of

SOURCES = ("deepspeed",)


def rewrite(draft: Draft) -> None:
    """Rewrite backward, step and zero_grad."""
    for call, _ in draft.methods("backward", "step", "zero_grad", sources=SOURCES):
        assert isinstance(call.func, cst.Attribute)
        setup = setup_at(draft, call.func.value)
        if setup is None:
            draft.todo(call, "several engines with different configs may be meant here: step each optimizer by hand")
            continue
        code = _engine(draft, call.func.value)
        method = call.func.attr.value
        if method == "backward":
            _backward(draft, call, setup, code)
        elif method == "step":
            _step(draft, call, setup, code)
        elif setup.accumulates and isinstance(draft.module.parent(call), cst.Expr):
            draft.delete(call)
            draft.note(call, Grade.EXACT, "gradients are zeroed after each update")
    _zero_grads(draft)


def _engine(draft: Draft, node: cst.BaseExpression) -> str:
    return draft.code(node).removesuffix(".module")


def _zero_grads(draft: Draft) -> None:
    """`optimizer.zero_grad()` on the engine's own optimizer would drop what micro-batches have accumulated."""
    for call in draft.module.every(cst.Call):
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value != "zero_grad" or draft.module.skips(call):
            continue
        origins = {(id(o.node), o.name[-3:]) for o in draft.origins(func.value)}
        for wrap in draft.all_wraps:
            setup = wrap.facts.get("deepspeed")
            mine = (id(wrap.call), "[1]") in origins and not wrap.plan.refused
            if mine and isinstance(setup, Setup) and setup.accumulates and _alone(draft, call):
                draft.delete(call)
                draft.note(call, Grade.EXACT, "gradients are zeroed after each update")


def _alone(draft: Draft, call: cst.Call) -> bool:
    return isinstance(draft.module.parent(call), cst.Expr)


def boundary(setup: Setup, code: str) -> Line:
    """Whether the micro-batch at hand is the last one of its update, before it is counted."""
    return (f"({setup.at(code, 'micro_steps')} + 1) % ", *_steps(setup, code), " == 0")


def _steps(setup: Setup, code: str) -> Line:
    line = setup.value(code, "accumulation_steps", setup.accumulation)
    return line if len(line) == 1 else ("(", *line, ")")


def _backward(draft: Draft, call: cst.Call, setup: Setup, code: str) -> None:
    loss = argument_of(call, ["loss"], "loss")
    retain = argument_of(call, ["loss", "retain_graph"], "retain_graph")
    scale = argument_of(call, ["loss", "retain_graph", "scale_wrt_gas"], "scale_wrt_gas")
    if loss is None:
        return
    statement = draft.module.statement(call)
    target = ""
    if isinstance(statement, cst.Assign) and statement.value is call and len(statement.targets) == 1:
        target = draft.code(statement.targets[0].target)
    elif not _alone(draft, call):
        draft.todo(call, "engine.backward inside an expression: divide the loss and call its backward")
        return
    divides = setup.accumulates and (scale is None or draft.code(scale) != "False")
    quoted = draft.module.quote(loss)
    tight = isinstance(loss, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) and not loss.lpar
    value: Line = quoted if tight else ("(", *quoted, ")")
    if divides:
        value = (*value, " / ", *_steps(setup, code))
    lines: list[Line] = []
    if setup.accumulates and setup.stage < 2:
        lines.append((f"{code}.set_requires_gradient_sync(", *boundary(setup, code), ")"))
    if target:
        lines.append((f"{target} = ", *value))
        value, divides = (target,), False
    if setup.precision == "fp16":
        value = (f"{setup.at(code, 'scaler')}.scale(", *value, ")")
    elif divides:
        value = ("(", *value, ")")
    keep: Line = ("retain_graph=", *draft.module.quote(retain)) if retain is not None else ()
    lines.append((*value, ".backward(", *keep, ")"))
    draft.statement_becomes(statement, lines)
    message = "engine.backward is the loss's backward"
    draft.note(call, Grade.EXACT, message + (", divided by the accumulation steps" if divides or target else ""))


def _step(draft: Draft, call: cst.Call, setup: Setup, code: str) -> None:
    if not _alone(draft, call):
        draft.todo(call, "engine.step inside an expression: give it a statement of its own")
        return
    lines = _update(draft, setup, code)
    if setup.accumulates:
        count = setup.at(code, "micro_steps")
        test: Line = (f"if {count} % ", *_steps(setup, code), " == 0:")
        step = draft.module.step()
        lines = [(f"{count} += 1",), test, *((step, *line) for line in lines)]
    draft.statement_becomes(call, lines)
    clipped = "" if setup.clip is None else f" with clipping at {''.join(map(str, setup.clip))}"
    default = " (DeepSpeed's default)" if setup.clip == ("1.0",) and "gradient_clipping" not in setup.tree else ""
    draft.note(call, Grade.EXACT, f"engine.step is written out{clipped}{default}")


def _update(draft: Draft, setup: Setup, code: str) -> list[Line]:
    torch = draft.need_module("torch")
    step, optimizer = draft.module.step(), setup.at(code, "optimizer")
    lines: list[Line] = []
    wants_norm = "grad_norm" in setup.counts
    if setup.clip is not None or wants_norm:
        limit = ('float("inf")',) if setup.clip is None else setup.value(code, "max_norm", setup.clip)
        clip: Line = (f"{torch}.nn.utils.clip_grad_norm_({code}.parameters(), ", *limit, ")")
        lines.append((f"{setup.at(code, 'grad_norm')} = ", *clip, ".full_tensor()") if wants_norm else clip)
    lines.append((f"{optimizer}.step()",))
    if setup.scheduler:
        lines.append((f"{setup.at(code, 'lr_scheduler')}.step()",))
    if setup.precision == "fp16":
        finite: Line = (f"if {setup.at(code, 'scaler')}.unscale({code}.parameters()):",)
        lines = [finite, *((step, *line) for line in lines)]
    lines.append((f"{optimizer}.zero_grad()",))
    if "global_steps" in setup.counts:
        lines.append((f"{setup.at(code, 'global_steps')} += 1",))
    return lines
