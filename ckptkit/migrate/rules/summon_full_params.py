"""summon_full_params becomes a context manager that puts whole parameters in the place of the sharded ones.

What: `FSDP.summon_full_params(model, ...)` becomes `full_params(model, ...)`, a function written into the file. Where
the body calls the model itself (`model.generate(...)`, `model(...)`), the context goes: calling a sharded model
gathers what it needs.

Why: FSDP2 has no such context; `model.unshard()` follows param_dtype, is not recursive and writes nothing back.

Before::

    with FSDP.summon_full_params(model, writeback=False):
        norm = model.embed.weight.norm()

After::

    with full_params(model, writeback=False):
        norm = model.embed.weight.norm()

In numbers: equal.

Known limits: `rank0_only` and `offload_to_cpu` saved memory and have no counterpart here: whole parameters are on all
ranks, on the device. The optimizer must not step inside. For a state dict use get_model_state_dict.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..full_params import helper
from ..grade import Grade
from ..names import FSDP
from ..syntax import argument_of

SOURCES = ("fsdp1",)
_PARAMETERS = ["module", "recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"]


def rewrite(draft: Draft) -> None:
    """Rewrite every context."""
    calls = [(call, argument_of(call, _PARAMETERS, "module")) for call in draft.calls(FSDP + ".summon_full_params")]
    for call, _ in draft.methods("summon_full_params", sources=("fsdp1",)):
        if not any(call is known for known, _ in calls):
            calls.append((call, argument_of(call, _PARAMETERS, "module")))
    for call, model in calls:
        if model is None or not draft.is_migrated(model):
            continue
        statement = draft.module.statement(call)
        if isinstance(statement, cst.With) and _runs_model(draft, statement, model):
            _drop(draft, call, statement)
        else:
            _replace(draft, call, model)


def _runs_model(draft: Draft, statement: cst.With, model: cst.BaseExpression) -> bool:
    """Whether the body calls the model, or a method of it that runs it."""
    wanted = {id(wrap) for wrap in draft.wraps_of(model)}
    for call in draft.module.inside(statement.body, cst.Call):
        func = call.func
        if any(id(wrap) in wanted for wrap in draft.wraps_of(func)):
            return True
        runs = isinstance(func, cst.Attribute) and func.attr.value in ("generate", "forward", "sample", "predict")
        if runs and any(id(wrap) in wanted for wrap in draft.wraps_of(func.value)):  # type: ignore[attr-defined]
            return True
    return False


def _drop(draft: Draft, call: cst.Call, statement: cst.With) -> None:
    if len(statement.items) == 1 and draft.unwrap(statement):
        draft.note(call, Grade.EXACT, "calling a sharded model gathers its parameters: the context goes")
        return
    nothing = draft.need("contextlib", "nullcontext")
    draft.replace(call, f"{nothing}()")
    draft.note(call, Grade.EXACT, "calling a sharded model gathers its parameters: the context does nothing")


def _replace(draft: Draft, call: cst.Call, model: cst.BaseExpression) -> None:
    kept: list = []
    lost = []
    for name in _PARAMETERS[1:]:
        value = argument_of(call, _PARAMETERS, name)
        if value is None:
            continue
        if name in ("recurse", "writeback", "with_grads"):
            kept += [f", {name}=", *draft.module.quote(value)]
        elif draft.code(value) != "False":
            lost.append(name)
    draft.replace(call, f"{helper(draft)}(", *draft.module.quote(model), *kept, ")")
    if lost:
        draft.note(call, Grade.PERFORMANCE, f"{' and '.join(lost)}: whole parameters are on all ranks, on the device")
    else:
        draft.note(call, Grade.EXACT, "summon_full_params becomes a context that swaps whole parameters in")
