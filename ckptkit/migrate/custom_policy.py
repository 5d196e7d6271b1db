"""A CustomPolicy whose function answers dicts: its arguments of FSDP1 become those of fully_shard, where they stand."""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .origin import CALL, FUNCTION, LITERAL, Origin
from .plan import Line
from .syntax import argument_of, returns
from .wraps import Value

_FSDP = "torch.distributed.fsdp."
_STRATEGIES = {"FULL_SHARD": "True", "SHARD_GRAD_OP": "False"}

HELPER = '''def shard_by_choice(module, choose, *, ignored=frozenset(), **kwargs):
    """Shard the submodules that the function of a CustomPolicy picks, with the arguments that it answers for them."""
    chosen = {m: choose(m) for m in list(module.modules())[1:] if m not in ignored}
    for unit in reversed(list(chosen)):
        if chosen[unit]:
            FULLY_SHARD(unit, **{**kwargs, **(chosen[unit] if isinstance(chosen[unit], dict) else {})})'''


def function_of(draft: Draft, policy: Origin) -> Value | None:
    """The function that a CustomPolicy is made of, where it is one of the module of the draft."""
    if not isinstance(policy.node, cst.Call) or policy.module is not draft.module:
        return None
    given = argument_of(policy.node, ["lambda_fn"], "lambda_fn")
    return Value(policy.module, given) if given is not None else None


def translated(draft: Draft, function: Value) -> list[tuple[cst.CSTNode, Line]] | None:
    """The edits of the dicts that a function returns; None where one of them is out of reach."""
    bodies = draft.flow.origins(function.module, function.node)
    if len(bodies) != 1:
        return None
    body = next(iter(bodies))
    if body.module is not draft.module:
        return None
    if body.kind == FUNCTION and isinstance(body.node, cst.FunctionDef):
        answers = [r.value for r in returns(draft.module, body.node) if r.value is not None]
    elif isinstance(body.node, cst.Lambda):
        answers = [body.node.body]
    else:
        return None
    edits: list[tuple[cst.CSTNode, Line]] = []
    for answer in answers:
        found = _answer(draft, answer)
        if found is None:
            return None
        edits += found
    return edits


def _answer(draft: Draft, node: cst.BaseExpression) -> list[tuple[cst.CSTNode, Line]] | None:
    """The edits of one returned expression; None where it may be a dict that is not seen."""
    if isinstance(node, cst.IfExp):
        both = [_answer(draft, one) for one in (node.body, node.orelse)]
        return [edit for edits in both for edit in edits or []] if None not in both else None
    if not isinstance(node, cst.Dict):
        dicts = [o for o in draft.origins(node) if isinstance(o.node, cst.Dict)]
        if not dicts:
            return []
        known = len(dicts) == 1 and dicts[0].module is draft.module and dicts[0].kind == LITERAL
        return _answer(draft, dicts[0].node) if known else None  # type: ignore[arg-type]
    edits: list[tuple[cst.CSTNode, Line]] = []
    for element in node.elements:
        if not isinstance(element, cst.DictElement) or not isinstance(element.key, cst.SimpleString):
            return None
        entry = _entry(draft, str(element.key.evaluated_value), element.value)
        if entry is None:
            return None
        name, value = entry
        quote = element.key.quote
        edits += [(element.key, (f"{quote}{name}{quote}",)), (element.value, value)]
    return edits


def _entry(draft: Draft, name: str, value: cst.BaseExpression) -> tuple[str, Line] | None:
    """An argument of FSDP1 as one of fully_shard."""
    origins = draft.origins(value)
    if len(origins) != 1 or not draft.flow.is_fixed(draft.module, value):
        return None
    origin = next(iter(origins))
    if name == "sharding_strategy":
        frees = _STRATEGIES.get(origin.name.removeprefix(_FSDP + "ShardingStrategy."))
        return ("reshard_after_forward", (frees,)) if frees else None
    if not isinstance(origin.node, cst.Call) or origin.kind != CALL or origin.module is not draft.module:
        return None
    call = origin.node
    if name == "cpu_offload" and origin.name == _FSDP + "CPUOffload":
        on = argument_of(call, ["offload_params"], "offload_params")
        word = "CPUOffloadPolicy" if on is not None and draft.code(on) == "True" else "OffloadPolicy"
        return "offload_policy", (f"{draft.need('torch.distributed.fsdp', word)}()",)
    if name == "mixed_precision" and origin.name == _FSDP + "MixedPrecision":
        policy = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
        pieces: list = []
        for argument in call.args:
            key = argument.keyword.value if argument.keyword is not None else ""
            if key not in ("param_dtype", "reduce_dtype"):
                return None
            pieces += [f"{key}=", *draft.module.quote(argument.value), ", "]
        return "mp_policy", (f"{policy}(", *pieces, "cast_forward_inputs=False)")
    return None
