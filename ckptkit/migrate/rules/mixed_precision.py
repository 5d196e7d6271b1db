"""MixedPrecision becomes MixedPrecisionPolicy, with FSDP1's casting of inputs and its fp32 BatchNorm layers.

What: `mixed_precision=MixedPrecision(...)` becomes `mp_policy=MixedPrecisionPolicy(...)` on every call.

Why, field by field: `param_dtype` and `reduce_dtype` mean the same (an absent reduce_dtype is param_dtype in both).
FSDP1 casts the inputs of the root only (`cast_root_forward_inputs=True, cast_forward_inputs=False`), FSDP2 by default
those of every group: the groups below the root get `cast_forward_inputs=False`. `buffer_dtype` has no counterpart:
where the model may have buffers they are cast once. With a wrap policy FSDP1 wrapped each BatchNorm alone in fp32 and
cast around it: such a layer gets a group of its own with fp32 parameters and an output in param_dtype.

Before::

    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(model, auto_wrap_policy=policy, mixed_precision=bf16)

After::

    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(
                module,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
                ),
            )
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

In numbers: equal for the first steps, and close to equal after (losses of bf16 runs drift apart by about 1e-3 in 50
steps). Two things differ and are graded numerics: buffers that were cast stay cast in checkpoints (FSDP1 restored
them), and gradients that are accumulated under no_sync are kept in reduce_dtype where FSDP1 kept them in param_dtype.

Known limits: `keep_low_precision_grads=True` and the environment variable FSDP_USE_FULL_PREC_IN_EVAL have no
counterpart. A MixedPrecision that is chosen at run time is rewritten where it is made, with `dataclasses.replace` for
the inner groups; its buffer_dtype is not carried over.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..flow import CALL, LITERAL, NAME, Origin, argument_of
from ..grade import Grade
from ..models import may_have_batch_norm, may_have_buffers
from ..plan import MODEL, UNIT, Line, Order, Unit
from ..rule import spell
from ..wraps import Value, Wrap

SOURCES = ("fsdp1",)
MIXED_PRECISION = "torch.distributed.fsdp.MixedPrecision"
_FIELDS = ["param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads", "cast_forward_inputs"]
_FIELDS += ["cast_root_forward_inputs", "_module_classes_to_ignore"]


def plan(draft: Draft, wrap: Wrap) -> None:
    """Carry the policy over to every fully_shard call."""
    value = wrap.get("mixed_precision")
    if value is None:
        return
    origins = draft.flow.origins(value.module, value.node)
    made = [o for o in origins if o.kind == CALL and o.name == MIXED_PRECISION and isinstance(o.node, cst.Call)]
    nothing = [o for o in origins if o.kind == LITERAL and o.name == "None"]
    dtypes = [o for o in origins if o.kind == NAME and o.name.startswith("torch.")]
    if len(made) == 1 and len(origins) == 1:
        fields = {name: argument_of(made[0].node, _FIELDS, name) for name in _FIELDS}  # type: ignore[arg-type]
        _known(draft, wrap, {n: Value(made[0].module, f) for n, f in fields.items() if f is not None})
    elif len(dtypes) == 1 and len(origins) == 1:
        draft.note(
            wrap.call,
            Grade.NUMERICS,
            "a dtype is no MixedPrecision and fails in FSDP1; read as param_dtype, reduce_dtype and buffer_dtype",
        )
        _known(draft, wrap, dict.fromkeys(_FIELDS[:3], value))
    elif made and len(made) + len(nothing) == len(origins):
        _chosen_at_run_time(draft, wrap, value, made, bool(nothing))
    else:
        wrap.plan.refuse(
            "mixed-precision", f"what mixed_precision={wrap.text('mixed_precision')} is, is only known at run time"
        )


def _known(draft: Draft, wrap: Wrap, fields: dict[str, Value]) -> None:
    spelled: dict[str, Line] = {}
    for name in _FIELDS[:3]:
        value = fields.get(name)
        if value is None or (draft.flow.origins(value.module, value.node) and _is_none(value)):
            continue
        here = spell(draft, wrap, value)
        if here is None:
            wrap.plan.refuse("mixed-precision", f"{name}={value.module.code(value.node)} is out of reach at this call")
            return
        spelled[name] = here
    policy = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
    dtypes = [(f"{name}=", *spelled[name]) for name in _FIELDS[:2] if name in spelled]
    casts_root = not _is(fields.get("cast_root_forward_inputs"), "False")
    casts = _is(fields.get("cast_forward_inputs"), "True")
    wrap.plan.root_kwargs["mp_policy"] = _call(policy, dtypes, casts_root)
    wrap.plan.child_kwargs["mp_policy"] = _call(policy, dtypes, casts)
    if not dtypes and casts_root and not wrap.plan.units:
        wrap.plan.root_kwargs.pop("mp_policy")
    draft.note(
        wrap.call, Grade.EXACT, "mixed_precision becomes mp_policy; inputs are cast at the root only, as FSDP1 does"
    )
    if _is(fields.get("keep_low_precision_grads"), "True"):
        draft.todo(
            wrap.call, "keep_low_precision_grads=True has no counterpart: gradients are cast to the parameters' dtype"
        )
    islands = "param_dtype" in spelled and wrap.text("auto_wrap_policy") not in ("", "None")
    if islands and may_have_batch_norm(draft, wrap):
        _batch_norm_islands(draft, wrap, policy, spelled["param_dtype"])
    else:
        islands = False
    if "buffer_dtype" in spelled and may_have_buffers(draft, wrap):
        _cast_buffers(draft, wrap, spelled["buffer_dtype"], skip_batch_norm=islands)


def _batch_norm_islands(draft: Draft, wrap: Wrap, policy: str, dtype: Line) -> None:
    norm = _batch_norm(draft)
    torch = draft.need_module("torch")
    island = (f"{policy}(param_dtype={torch}.float32, output_dtype=", *dtype, ")")
    wrap.plan.units = [Unit((f"isinstance({UNIT}, {norm})",), {"mp_policy": island}), *wrap.plan.units]
    draft.note(wrap.call, Grade.EXACT, "BatchNorm layers get fp32 groups of their own, as FSDP1 did")


def _batch_norm(draft: Draft) -> str:
    return f"{draft.need_module('torch.nn', 'nn')}.modules.batchnorm._BatchNorm"


def _cast_buffers(draft: Draft, wrap: Wrap, dtype: Line, *, skip_batch_norm: bool) -> None:
    step = draft.module.step()
    buffer = draft.throwaway("buffer", "tensor")
    cast = (f"{step * 2}{buffer}.data = {buffer}.data.to(", *dtype, ")")
    if skip_batch_norm:
        holder = draft.throwaway("module", "submodule", "unit")
        lines: list[Line] = [
            (f"for {holder} in {MODEL}.modules():",),
            (f"{step}if isinstance({holder}, {_batch_norm(draft)}):",),
            (f"{step * 2}continue",),
            (f"{step}for {buffer} in {holder}.buffers(recurse=False):",),
            (f"{step * 2}if {buffer}.is_floating_point():",),
            (step, *cast),
        ]
    else:
        lines = [(f"for {buffer} in {MODEL}.buffers():",), (f"{step}if {buffer}.is_floating_point():",), cast]
    wrap.plan.step(Order.INIT, *lines)
    draft.note(wrap.call, Grade.NUMERICS, "buffer_dtype becomes a cast; checkpoints then hold the cast buffers")


def _chosen_at_run_time(draft: Draft, wrap: Wrap, value: Value, made: list[Origin], maybe_none: bool) -> None:
    """Rewrite each MixedPrecision where it is made, and use the chosen one here."""
    here = spell(draft, wrap, value)
    flags = [argument_of(o.node, _FIELDS, f) for o in made for f in _FIELDS[3:]]  # type: ignore[arg-type]
    if here is None or any(flag is not None for flag in flags):
        wrap.plan.refuse(
            "mixed-precision", "a mixed precision chosen at run time, with cast flags or out of reach here"
        )
        return
    policy = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
    for origin in made:
        peer = draft.peers[id(origin.module)]
        name = peer.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
        arguments: list = []
        for field in _FIELDS[:2]:
            given = argument_of(origin.node, _FIELDS, field)  # type: ignore[arg-type]
            if given is not None:
                arguments += [*([", "] if arguments else []), f"{field}=", *origin.module.quote(given)]
        peer.rule = "mixed-precision"
        if peer.replace(origin.node, f"{name}(", *arguments, ")"):
            peer.note(origin.node, Grade.EXACT, "MixedPrecision becomes MixedPrecisionPolicy")
            if argument_of(origin.node, _FIELDS, "buffer_dtype") is not None and may_have_buffers(draft, wrap):  # type: ignore[arg-type]
                peer.note(origin.node, Grade.NUMERICS, "buffer_dtype has no counterpart: buffers keep their dtype")
    if not wrap.plan.units and wrap.text("auto_wrap_policy") in ("", "None"):
        wrap.plan.root_kwargs["mp_policy"] = (*here, f" or {policy}()") if maybe_none else here
        return
    if maybe_none or not isinstance(value.node, cst.Name):
        name = draft.fresh("mp_policy", "precision_policy")
        fallback = f" or {policy}()" if maybe_none else ""
        lead: Line = (
            ("(", *here, ")") if fallback and isinstance(value.node, cst.IfExp) and not value.node.lpar else here
        )
        wrap.plan.step(Order.PREPARE, (f"{name} = ", *lead, fallback))
        here = (name,)
    replace = draft.need("dataclasses", "replace")
    wrap.plan.root_kwargs["mp_policy"] = here
    wrap.plan.child_kwargs["mp_policy"] = (f"{replace}(", *here, ", cast_forward_inputs=False)")
    draft.note(
        wrap.call, Grade.EXACT, "mixed_precision becomes mp_policy; inputs are cast at the root only, as FSDP1 does"
    )


def _call(policy: str, dtypes: list[Line], casts: bool) -> Line:
    pieces: list = []
    for one in [*dtypes, *([] if casts else [("cast_forward_inputs=False",)])]:
        pieces += [*([", "] if pieces else []), *one]
    return (f"{policy}(", *pieces, ")")


def _is(value: Value | None, text: str) -> bool:
    return value is not None and value.module.code(value.node) == text


def _is_none(value: Value) -> bool:
    return value.module.code(value.node) == "None"
