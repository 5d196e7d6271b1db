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
the inner groups; its buffer_dtype is not carried over. One that is made out of sight, or that a wrap which was left to
a person takes as well, stays, and `policy_of`, a function written into the file, asks it for what it says.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..edit import Span
from ..grade import Grade
from ..models import may_have_batch_norm, may_have_buffers
from ..origin import CALL, LITERAL, NAME, Origin
from ..plan import MODEL, UNIT, Line, Order, Unit
from ..rule import spell
from ..syntax import argument_of
from ..wraps import Value, Wrap

SOURCES = ("fsdp1",)
MIXED_PRECISION = "torch.distributed.fsdp.MixedPrecision"
_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
_FIELDS = ["param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads", "cast_forward_inputs"]
_FIELDS += ["cast_root_forward_inputs", "_module_classes_to_ignore"]
_DTYPES = _FIELDS[:3]

POLICY_OF = '''def policy_of(mixed_precision, root=False):
    """The policy of a group that does what a MixedPrecision of FSDP1 did: it cast the inputs of the root, or of all."""
    if mixed_precision is None:
        return POLICY()
    casts = mixed_precision.cast_root_forward_inputs if root else mixed_precision.cast_forward_inputs
    dtypes = {"param_dtype": mixed_precision.param_dtype, "reduce_dtype": mixed_precision.reduce_dtype}
    return POLICY(**dtypes, cast_forward_inputs=casts)'''


_NORMS = (
    "FSDP1 kept BatchNorm layers in fp32, which a policy chosen at run time does not: shard them first, with "
    "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=...)"
)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Carry the policy over to every fully_shard call."""
    value = wrap.get("mixed_precision")
    if value is None:
        return
    origins = draft.flow.origins(value.module, value.node)
    made = [o for o in origins if o.kind == CALL and o.name == MIXED_PRECISION and isinstance(o.node, cst.Call)]
    nothing = [o for o in origins if o.kind == LITERAL and o.name == "None"]
    rewritten = [o for o in origins if o.name == "torch.distributed.fsdp.MixedPrecisionPolicy"]
    dtypes = [o for o in origins if o.kind == NAME and o.name.startswith("torch.")]
    fixed = draft.flow.is_fixed(value.module, value.node)
    objects = made and len(made) + len(nothing) == len(origins)
    kept = wrap.facts.get("keeps") and not (len(made) == 1 and len(origins) == 1 and fixed)
    fields = _fields(made[0]) if len(made) == 1 and len(origins) == 1 and fixed else {}
    if fields and not all(_is_none(f) or spell(draft, wrap, f) is not None for n, f in fields.items() if n in _DTYPES):
        fields, kept = {}, bool(wrap.facts.get("keeps"))  # made where the names mean something: rewritten there
    if fields or (len(made) == 1 and not made[0].node.args):  # type: ignore[attr-defined]
        _known(draft, wrap, fields)
    elif len(dtypes) == 1 and len(origins) == 1:
        draft.note(
            wrap.call,
            Grade.NUMERICS,
            "a dtype is no MixedPrecision and fails in FSDP1; read as param_dtype, reduce_dtype and buffer_dtype",
        )
        _known(draft, wrap, dict.fromkeys(_FIELDS[:3], value))
    elif objects and not kept and not _has_odd_flags(made):
        _chosen_at_run_time(draft, wrap, value, made, bool(nothing))
    elif rewritten and len(rewritten) + len(nothing) == len(origins):
        # Another wrap of the program had the objects rewritten in an earlier run, and this one was left to a person.
        _chosen_at_run_time(draft, wrap, value, made, bool(nothing))
    else:
        _asked_at_run_time(draft, wrap, value)


def rewrite(draft: Draft) -> None:
    """Rewrite the objects that no wrap of the program takes literally, such as a choice of policies in a module."""
    for text in draft.module.every(cst.SimpleString):
        if text.value.strip("'\"") == _EVAL and not draft.module.skips(text):
            draft.todo(text, f"{_EVAL} has no counterpart: FSDP2 keeps param_dtype in eval")
    chosen = {id(call): flag for w in draft.all_wraps if not w.plan.refused for call, flag in w.plan.objects}
    stays = any(_may_take_any(draft, wrap) or "asked" in wrap.facts for wrap in draft.all_wraps)
    stays |= any("def policy_of(" in module.text.masked for module in draft.flow.program)  # of an earlier run
    for call in draft.calls(MIXED_PRECISION):
        if id(call) in chosen:
            _rewrite_object(draft, call, flag=chosen[id(call)])
            continue
        if stays or any(wrap.plan.refused and _takes(draft, wrap, call) for wrap in draft.all_wraps):
            continue
        if any(argument_of(call, _FIELDS, name) is not None for name in _FIELDS[3:]) or any(a.star for a in call.args):
            continue  # literal users have carried the flags over; otherwise the generic check reports it
        taken = any(not wrap.plan.refused and _takes(draft, wrap, call) for wrap in draft.all_wraps)
        _rewrite_object(draft, call, quiet=taken)


def _may_take_any(draft: Draft, wrap: Wrap) -> bool:
    """Whether a wrap that stays takes a policy that is not seen: it may be any of the program."""
    value = wrap.args.get("mixed_precision")
    unseen = value is not None and not draft.flow.origins(value.module, value.node)
    return wrap.plan.refused and wrap.source == "fsdp1" and (unseen or bool(wrap.unresolved))


def _fields(made: Origin) -> dict[str, Value]:
    assert isinstance(made.node, cst.Call)
    given = {name: argument_of(made.node, _FIELDS, name) for name in _FIELDS}
    return {name: Value(made.module, value) for name, value in given.items() if value is not None}


def _has_odd_flags(made: list[Origin]) -> bool:
    odd = ("keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore")
    return any(name in odd for origin in made for name in _fields(origin))


def _asked_at_run_time(draft: Draft, wrap: Wrap, value: Value) -> None:
    """Keep the MixedPrecision as it is, and ask it for the policy of each group."""
    here = spell(draft, wrap, value)
    if here is None:
        text = wrap.text("mixed_precision")
        wrap.plan.refuse("mixed-precision", f"mixed_precision={text} is out of reach at this call")
        return
    wrap.facts["asked"] = True
    policy = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
    draft.helpers.setdefault("policy_of", POLICY_OF.replace("POLICY", policy))
    if not isinstance(value.node, (cst.Name, cst.Attribute)):
        name = draft.fresh("mixed_precision", "fsdp_mixed_precision")
        wrap.plan.step(Order.PREPARE, (f"{name} = ", *here))
        here = (name,)
    wrap.plan.root_kwargs["mp_policy"] = ("policy_of(", *here, ", root=True)")
    wrap.plan.child_kwargs["mp_policy"] = ("policy_of(", *here, ")")
    draft.note(wrap.call, Grade.EXACT, "the MixedPrecision stays and is asked for the policy of each group")
    if may_have_batch_norm(draft, wrap) and _several_groups(wrap):
        draft.todo(wrap.call, _NORMS)
    if may_have_buffers(draft, wrap):
        step, buffer = draft.module.step(), draft.throwaway("buffer", "tensor")
        mixed = ("(", *here, ")") if len(here) > 1 else here
        wrap.plan.step(
            Order.INIT,
            ("if ", *mixed, " is not None and ", *mixed, ".buffer_dtype is not None:"),
            (f"{step}for {buffer} in {MODEL}.buffers():",),
            (f"{step * 2}if {buffer}.is_floating_point():",),
            (f"{step * 3}{buffer}.data = {buffer}.data.to(", *mixed, ".buffer_dtype)"),
        )
        draft.note(wrap.call, Grade.NUMERICS, "buffer_dtype becomes a cast; checkpoints then hold the cast buffers")


def _takes(draft: Draft, wrap: Wrap, call: cst.Call) -> bool:
    value = wrap.args.get("mixed_precision")
    return value is not None and any(o.node is call for o in draft.flow.origins(value.module, value.node))


def _rewrite_object(draft: Draft, call: cst.Call, *, quiet: bool = False, flag: bool = False) -> None:
    """`MixedPrecision(...)` becomes `MixedPrecisionPolicy(...)` where it stands.

    `quiet` where a wrap reports it; `flag` to spell out FSDP1's cast_forward_inputs for the groups below the root.
    """
    arguments: list = []
    for field in _FIELDS[:2]:
        given = argument_of(call, _FIELDS, field)
        if given is not None:
            arguments += [*([", "] if arguments else []), f"{field}=", *draft.module.quote(given)]
    if flag:
        given = argument_of(call, _FIELDS, "cast_forward_inputs")
        value: Line = draft.module.quote(given) if given is not None else ("False",)
        arguments += [*([", "] if arguments else []), "cast_forward_inputs=", *value]
    name = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
    before, draft.rule = draft.rule, "mixed-precision"
    comments = draft.module.comments_in(call, [piece for piece in arguments if isinstance(piece, Span)])
    new = draft.replace(call, f"{name}(", *arguments, ")")
    if new and comments:
        draft.before(call, *((comment,) for comment in comments))
    if new and not quiet:
        draft.note(call, Grade.EXACT, "MixedPrecision becomes MixedPrecisionPolicy")
        if argument_of(call, _FIELDS, "buffer_dtype") is not None:
            draft.note(call, Grade.NUMERICS, "buffer_dtype has no counterpart: buffers keep their dtype")
    draft.rule = before


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
        spelled[name] = here if _is_short(value) or not _several_groups(wrap) else _prepared(draft, wrap, name, here)
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


def _is_short(value: Value) -> bool:
    return isinstance(value.node, (cst.Name, cst.Attribute))


def _several_groups(wrap: Wrap) -> bool:
    return wrap.text("auto_wrap_policy") not in ("", "None")


def _prepared(draft: Draft, wrap: Wrap, name: str, value: Line) -> Line:
    """A name for an expression that every call repeats."""
    local = draft.fresh(name, f"fsdp_{name}")
    wrap.plan.step(Order.PREPARE, (f"{local} = ", *value))
    return (local,)


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
    calls = [o.node for o in made if isinstance(o.node, cst.Call)]
    if here is None:
        text = wrap.text("mixed_precision")
        wrap.plan.refuse("mixed-precision", f"mixed_precision={text} is out of reach at this call")
        return
    # Where some cast in every group, each object carries its own flag for the groups below the root.
    own_flags = any(argument_of(call, _FIELDS, "cast_forward_inputs") is not None for call in calls)
    policy = draft.need("torch.distributed.fsdp", "MixedPrecisionPolicy")
    for origin in made:
        assert isinstance(origin.node, cst.Call)
        wrap.plan.objects.append((origin.node, own_flags))
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
    if may_have_batch_norm(draft, wrap):
        draft.todo(wrap.call, _NORMS)
    replace = draft.need("dataclasses", "replace")
    wrap.plan.root_kwargs["mp_policy"] = (f"{replace}(", *here, ", cast_forward_inputs=True)") if own_flags else here
    child = here if own_flags else (f"{replace}(", *here, ", cast_forward_inputs=False)")
    wrap.plan.child_kwargs["mp_policy"] = child
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
