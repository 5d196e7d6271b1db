"""Models that an evaluation left gathered: before their states are taken or loaded they go back into shards.

After a forward without a backward FSDP2's root (and all of a model with reshard_after_forward=False) holds plain
parameters; its optimizer knows the sharded ones. `model.state_dict()` shards them again by a hook of its own, but
get_optimizer_state_dict, which matches by identity, raises KeyError, and set_model_state_dict fails on the mixture
(torch 2.13 torch/distributed/checkpoint/state_dict.py, `_get_optim_state_dict`).
"""

from __future__ import annotations

import re

import libcst as cst

from .draft import Draft
from .plan import Line
from .syntax import surely_ran

EVALUATES = re.compile(r"\b(no_grad|inference_mode|generate)\b")
HELPER = '''def resharded(model):
    """The model with its parameters in shards, as its optimizer knows them: an evaluation leaves some gathered."""
    for module in model.modules():
        if isinstance(module, FSDPMODULE):
            module.reshard()
    return model'''


def for_saving(draft: Draft, call: cst.Call, model: cst.BaseExpression, name: Line) -> Line:
    """The model of which an optimizer's state is taken at `call`; nothing is needed where its own is taken first."""
    if not _evaluates(draft):
        return name
    text = _plain(draft.code(model))
    at, function = draft.module.span(call).start, draft.module.function(call)
    for other in draft.module.every(cst.Call):
        func = other.func
        if (
            not isinstance(func, cst.Attribute)
            or func.attr.value != "state_dict"
            or _plain(draft.code(func.value)) != text
        ):
            continue
        first = draft.module.span(other).start < at and draft.module.function(other) is function
        if first and surely_ran(draft.module, other, call):
            return name
    return wrapped(draft, name)


def for_loading(draft: Draft, call: cst.Call, name: Line) -> Line:
    """The model that is loaded at `call`, if that may be after a loop that evaluates."""
    return wrapped(draft, name) if _evaluates(draft) and _after_loop(draft, call, 2) else name


def _evaluates(draft: Draft) -> bool:
    """Whether the program runs a model without a backward."""
    return any(EVALUATES.search(module.text.masked) for module in draft.flow.program)


def _after_loop(draft: Draft, call: cst.Call, depth: int) -> bool:
    module, function = draft.module, draft.module.function(call)
    if module.loops(call):
        return True
    loops = [loop for loop in module.every(cst.For, cst.While) if module.function(loop) is function]
    if any(module.span(loop).stop <= module.span(call).start for loop in loops):
        return True
    if not depth or not isinstance(function, cst.FunctionDef):
        return False
    callers = [(draft.peers.get(id(where)), outer) for where, outer in draft.flow.callers(module, function)]
    return any(peer is not None and _after_loop(peer, outer, depth - 1) for peer, outer in callers)


def wrapped(draft: Draft, name: Line) -> Line:
    """`resharded(name)`, with the helper written into the file."""
    if "resharded" not in draft.helpers:
        kind = draft.need("torch.distributed.fsdp", "FSDPModule")
        draft.helpers["resharded"] = HELPER.replace("FSDPMODULE", kind)
    return ("resharded(", *name, ")")


def _plain(text: str) -> str:
    return text.removesuffix(".module")
