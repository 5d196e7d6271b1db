"""get_accelerator() becomes torch: the device of this rank, and torch.cuda for all else.

What: questions about the device (`device_name`, `current_device_name`, `current_device`) become `local_device()`, a
function written into the file; memory, streams, events, seeds and NVTX ranges become those of `torch.cuda`;
`set_device` and `synchronize` run only where there is a GPU, as DeepSpeed's CPU accelerator does nothing for them.

Before::

    device = get_accelerator().device_name()
    get_accelerator().set_device(local_rank)
    get_accelerator().empty_cache()

After::

    device = local_device().type
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    torch.cuda.empty_cache()

In numbers: equal.

Known limits: DeepSpeed's other accelerators (xpu, npu, hpu, mps) become CUDA or the CPU: change `local_device` for
them. Methods that the table does not know are left with a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..ds_setup import local_device
from ..grade import Grade
from ..origin import CALL
from ..plan import Line

SOURCES = ("deepspeed",)
_GETTERS = (
    "deepspeed.get_accelerator",
    "deepspeed.accelerator.get_accelerator",
    "deepspeed.accelerator.real_accelerator.get_accelerator",
)
# The same name in torch.cuda, and harmless where there is no GPU.
_SAME = frozenset(
    "empty_cache memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_stats "
    "reset_max_memory_allocated device_count is_available manual_seed manual_seed_all Stream stream current_stream "
    "default_stream Event get_rng_state set_rng_state initial_seed random device".split()
)
_RENAMED = {"range_push": "nvtx.range_push", "range_pop": "nvtx.range_pop"}
_ON_GPU = ("set_device", "synchronize", "reset_peak_memory_stats")  # raise without a GPU


def rewrite(draft: Draft) -> None:
    """Rewrite all calls of methods, unless an engine stays."""
    if any(wrap.plan.refused for wrap in draft.all_wraps if wrap.source == "deepspeed"):
        return
    module = draft.module
    for call in module.every(cst.Call):
        func = call.func
        if not isinstance(func, cst.Attribute) or module.skips(call) or not _is_accelerator(draft, func.value):
            continue
        if not _write(draft, call, func.attr.value):
            draft.todo(call, f"{func.attr.value} of DeepSpeed's accelerator: ask torch for it")
            continue
        draft.note(call, Grade.EXACT, f"{func.attr.value} of DeepSpeed's accelerator is asked of torch")
    for call in draft.calls(*_GETTERS):
        statement = module.statement(call)
        if isinstance(statement, cst.Assign) and statement.value is call and len(statement.targets) == 1:
            draft.sweepable.append(statement)


def _is_accelerator(draft: Draft, node: cst.BaseExpression) -> bool:
    origins = draft.origins(node)
    return bool(origins) and all(o.kind == CALL and o.name in _GETTERS for o in origins)


def _write(draft: Draft, call: cst.Call, name: str) -> bool:
    """Write the torch of one call; False where there is none."""
    torch = draft.need_module("torch")
    head, span = draft.module.span(call.func), draft.module.span(call)
    arguments: Line = tuple(piece for a in call.args for piece in (*draft.module.quote(a.value), ", "))[:-1]
    here = f"{torch}.cuda.is_available()"
    line: Line | None = None
    if name == "device_name":
        line = (f"{local_device(draft)}().type",)
        if call.args:
            line = ("(", 'f"cuda:{', *arguments, f'}}" if {here} else "cpu")')
    elif name == "current_device_name" and not call.args:
        line = (f"str({local_device(draft)}())",)
    elif name == "current_device" and not call.args:
        line = (f"{local_device(draft)}()",)
    elif name == "communication_backend_name":
        line = (f'("nccl" if {here} else "gloo")',)
    elif name == "is_bf16_supported":
        line = (f"(not {here} or {torch}.cuda.is_bf16_supported())",)
    elif name == "is_fp16_supported":
        line = ("True",)
    elif name == "on_accelerator" and call.args:
        line = (*arguments, ".is_cuda")
    elif name in _ON_GPU:
        plain: Line = (f"{torch}.cuda.{name}(", *arguments, ")")
        if isinstance(draft.module.parent(call), cst.Expr):
            draft.statement_becomes(call, [(f"if {here}:",), (draft.module.step(), *plain)])
            return True
        line = ("(", *plain, f" if {here} else None)")
    elif name in _SAME or name in _RENAMED:
        draft.replace_span(head, f"{torch}.cuda.{_RENAMED.get(name, name)}")
        return True
    if line is None:
        return False
    draft.replace_span(span, *line)
    return True
