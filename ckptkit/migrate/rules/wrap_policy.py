"""auto_wrap_policy becomes a plain loop over the submodules, children before parents.

What: ModuleWrapPolicy, transformer_auto_wrap_policy, lambda_auto_wrap_policy, _or_policy, always_wrap_policy,
CustomPolicy with a literal function and size_based_auto_wrap_policy, as values, in `functools.partial`, or from
another module of the run.

Why: `fully_shard` has no policy; what is wrapped is a loop in the program. FSDP1 walks the tree in post-order and
never asks the policy about the root, which it always wraps: `reversed(list(model.modules())[1:])` visits the same
modules in an order that has children before parents.

Before::

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(model, auto_wrap_policy=policy)

After::

    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)

A policy that counts parameters (size_based_auto_wrap_policy), that is the program's own function, or that is only
known at run time becomes `shard_by_policy(model, policy)`: a function written into the file that walks the tree
exactly as FSDP1 does. The policy objects themselves stay, they are plain callables; `size_based_auto_wrap_policy` and
the others are still imported from torch.distributed.fsdp.wrap. A CustomPolicy whose function answers dicts of
arguments becomes `shard_by_choice(model, function)`, and the dicts name those of fully_shard:
`{"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}` is `{"reshard_after_forward": False}`.

In numbers: equal; the groups are the same modules.

Known limits: `size_based_auto_wrap_policy(min_num_params=...)` called directly is an error in the original program
(it is a policy, not a policy factory); it is read as `functools.partial(size_based_auto_wrap_policy,
min_num_params=...)`. always_wrap_policy also wrapped ModuleLists and ModuleDicts, which fully_shard refuses and which
hold no parameters of their own: they are left out. Dicts of a CustomPolicy that hold other arguments than
sharding_strategy, mixed_precision and cpu_offload, or are built out of sight, are left with a TODO. Traversal read
in torch 2.13 torch/distributed/fsdp/wrap.py (_recursive_wrap, _construct_wrap_fn).
"""

from __future__ import annotations

import libcst as cst

from ..custom_policy import HELPER as CHOICE
from ..custom_policy import function_of, translated
from ..draft import Draft
from ..grade import Grade
from ..module import Module
from ..origin import CALL, FUNCTION, LITERAL, NAME, Origin
from ..plan import UNIT, Line, Unit
from ..rule import spell
from ..syntax import argument_of, returns
from ..wraps import Value, Wrap

SOURCES = ("fsdp1",)

_WRAP = "torch.distributed.fsdp."
TRANSFORMER = _WRAP + "transformer_auto_wrap_policy"
BY_CLASS = _WRAP + "_module_wrap_policy"
LAMBDA = _WRAP + "lambda_auto_wrap_policy"
CUSTOM = _WRAP + "CustomPolicy"
OR = _WRAP + "_or_policy"
ALWAYS = _WRAP + "always_wrap_policy"
SIZE = _WRAP + "size_based_auto_wrap_policy"

HELPER = '''def shard_by_policy(module, policy, *, ignored=frozenset(), only_children=True, **kwargs):
    """Shard the submodules that an FSDP1 auto_wrap_policy picks, children first; answers the parameters dealt with."""
    left_out = {p for m in ignored for p in m.parameters()}
    total = sum(p.numel() for p in module.parameters() if p not in left_out)
    if policy is None or not policy(module=module, recurse=True, nonwrapped_numel=total):
        return 0
    done = 0
    for child in module.children():
        if child not in ignored:
            done += shard_by_policy(child, policy, ignored=ignored, only_children=False, **kwargs)
    if not only_children and policy(module=module, recurse=False, nonwrapped_numel=total - done):
        FULLY_SHARD(module, **kwargs)
        return total
    return done
'''


def plan(draft: Draft, wrap: Wrap) -> None:
    """Turn the policy into units of the plan."""
    value = wrap.get("auto_wrap_policy")
    if value is None:
        return
    origins = draft.flow.origins(value.module, value.node)
    units = _units(draft, wrap, origins, value)
    if units is not None:
        wrap.plan.units = [*wrap.plan.units, *units]
        draft.note(wrap.call, Grade.EXACT, "auto_wrap_policy becomes a loop, children before parents")
        return
    if len(origins) == 1 and (origin := next(iter(origins))).name == CUSTOM and origin.kind == CALL:
        _custom(draft, wrap, origin)
        return
    policy = _run_time_policy(draft, wrap, value)
    if policy is None:
        return
    wrap.plan.policy = policy
    name = draft.need("torch.distributed.fsdp", "fully_shard")
    if "shard_by_policy" not in draft.helpers:
        draft.helpers["shard_by_policy"] = HELPER.replace("FULLY_SHARD", name).rstrip("\n")
    draft.note(wrap.call, Grade.EXACT, "auto_wrap_policy is applied by shard_by_policy, which walks as FSDP1 does")


def _custom(draft: Draft, wrap: Wrap, policy: Origin) -> None:
    """A CustomPolicy whose function may answer dicts is asked at run time, as FSDP1 did."""
    function = function_of(draft, policy)
    here = spell(draft, wrap, function) if function is not None else None
    edits = translated(draft, function) if function is not None else None
    if wrap.facts.get("keeps") and edits:
        wrap.plan.refuse("wrap-policy", "its CustomPolicy is also that of a wrap which stays: give them two of them")
        return
    if here is None or edits is None:
        wrap.plan.refuse(
            "wrap-policy", "a CustomPolicy that answers dicts which are not in sight: write the loop over the modules"
        )
        return
    wrap.plan.edits += edits
    wrap.plan.edited += [policy.node] if edits else []
    wrap.plan.policy, wrap.plan.walker = here, ("shard_by_choice", "choose")
    name = draft.need("torch.distributed.fsdp", "fully_shard")
    draft.helpers.setdefault("shard_by_choice", CHOICE.replace("FULLY_SHARD", name))
    draft.note(
        wrap.call, Grade.EXACT, "the CustomPolicy is asked by shard_by_choice; its answers name fully_shard's arguments"
    )


def _units(draft: Draft, wrap: Wrap, origins: frozenset[Origin], value: Value) -> list[Unit] | None:
    """The conditions of a policy that is known in full here, or None."""
    if len(origins) != 1 or not draft.flow.is_fixed(value.module, value.node):
        return None
    condition = _condition(draft, wrap, next(iter(origins)), value)
    return None if condition is None else [Unit(condition)]


def _condition(draft: Draft, wrap: Wrap, origin: Origin, value: Value) -> Line | None:
    flow, module = draft.flow, origin.module
    if origin.kind == NAME:
        if origin.name == ALWAYS:
            nn = draft.need_module("torch.nn", "nn")
            return (f"not isinstance({UNIT}, ({nn}.ModuleList, {nn}.ModuleDict))",)
        return None
    if not isinstance(origin.node, cst.Call) or origin.kind != CALL:
        return None
    call, name = origin.node, origin.name
    if name == _WRAP + "ModuleWrapPolicy":
        classes = argument_of(call, ["module_classes"], "module_classes")
        return _isinstance(draft, wrap, Value(module, classes)) if classes is not None else None
    if name == CUSTOM:
        function = argument_of(call, ["lambda_fn"], "lambda_fn")
        return _predicate(draft, wrap, module, function) if function is not None else None
    if name == "functools.partial" and call.args:
        name, rest = flow.name(module, call.args[0].value), call.with_changes(args=call.args[1:])
    else:
        rest = call
    if name in (TRANSFORMER, BY_CLASS):
        key = "transformer_layer_cls" if name == TRANSFORMER else "module_classes"
        classes = argument_of(rest, [], key)
        return _isinstance(draft, wrap, Value(module, classes)) if classes is not None else None
    if name == LAMBDA:
        function = argument_of(rest, [], "lambda_fn")
        return _predicate(draft, wrap, module, function) if function is not None else None
    if name == OR:
        policies = argument_of(rest, [], "policies")
        return _any(draft, wrap, module, policies, value) if policies is not None else None
    return None


def _any(draft: Draft, wrap: Wrap, module: object, policies: cst.BaseExpression, value: Value) -> Line | None:
    if not isinstance(policies, (cst.List, cst.Tuple, cst.Set)):
        return None
    pieces: list = []
    for element in policies.elements:
        origins = draft.flow.origins(module, element.value)  # type: ignore[arg-type]
        condition = _condition(draft, wrap, next(iter(origins)), value) if len(origins) == 1 else None
        if condition is None:
            return None
        pieces += [*([" or "] if pieces else []), *condition]
    return tuple(pieces)


def _isinstance(draft: Draft, wrap: Wrap, classes: Value) -> Line | None:
    """`isinstance($unit, ...)` for a set, list or tuple of classes, or for a name that holds one."""
    node = classes.node
    if (
        isinstance(node, cst.Call)
        and len(node.args) == 1
        and draft.flow.called(classes.module, node)
        in (
            "builtins.set",
            "builtins.list",
            "builtins.tuple",
            "builtins.frozenset",
        )
    ):
        node = node.args[0].value
    if isinstance(node, (cst.Set, cst.List, cst.Tuple)):
        spelled: list[Line] = []
        for element in node.elements:
            one = _class(draft, wrap, Value(classes.module, element.value))
            if one is None:
                return None
            spelled.append(one)
        if len(spelled) == 1:
            return (f"isinstance({UNIT}, ", *spelled[0], ")")
        pieces: list = []
        for one in spelled:
            pieces += [*([", "] if pieces else []), *one]
        return (f"isinstance({UNIT}, (", *pieces, "))")
    whole = spell(draft, wrap, Value(classes.module, node))
    return (f"isinstance({UNIT}, tuple(", *whole, "))") if whole is not None else None


def _class(draft: Draft, wrap: Wrap, value: Value) -> Line | None:
    here = spell(draft, wrap, value)
    if here is not None:
        return here
    # A class of another module of the run, or imported there: import it here too.
    origins = draft.flow.origins(value.module, value.node)
    if len(origins) != 1:
        return None
    origin = next(iter(origins))
    if origin.kind == NAME and "." in origin.name and not origin.name.startswith("."):
        base, _, name = origin.name.rpartition(".")
        return (draft.need(base, name),)
    for statement in value.module.every(cst.ImportFrom):
        if statement.relative or isinstance(statement.names, cst.ImportStar) or statement.module is None:
            continue
        for alias in statement.names:
            local = alias.asname.name if alias.asname else alias.name
            if isinstance(local, cst.Name) and value.module.code(value.node) == local.value:
                return (draft.need(value.module.code(statement.module), value.module.code(alias.name)),)
    return None


def _predicate(draft: Draft, wrap: Wrap, module: object, function: cst.BaseExpression) -> Line | None:
    """A call of the predicate on `$unit`, or its body where it is a lambda."""
    origins = draft.flow.origins(module, function)  # type: ignore[arg-type]
    if len(origins) != 1:
        return None
    origin = next(iter(origins))
    if origin.kind == LITERAL and isinstance(origin.node, cst.Lambda) and origin.module is wrap.module:
        return _inlined(draft, wrap, origin.node)
    if origin.kind == FUNCTION:
        if isinstance(origin.node, cst.FunctionDef) and _may_answer_dicts(draft, origin.module, origin.node):
            return None
        name = spell(draft, wrap, Value(module, function))  # type: ignore[arg-type]
        return (*name, f"({UNIT})") if name is not None else None
    return None


def _may_answer_dicts(draft: Draft, module: Module, function: cst.FunctionDef) -> bool:
    written = any(module.inside(statement, cst.Dict) for statement in returns(module, function))
    return written or any(isinstance(origin.node, cst.Dict) for origin in draft.flow.returned(module, function))


def _inlined(draft: Draft, wrap: Wrap, function: cst.Lambda) -> Line | None:
    params = function.params.params
    if len(params) != 1 or wrap.module.inside(function.body, cst.Dict):
        return None
    name = params[0].name.value
    if spell(draft, wrap, Value(wrap.module, function)) is None and wrap.module.scope(
        function
    ) is not wrap.module.scope(wrap.call):
        return None
    span, pieces = wrap.module.span(function.body), []
    at = span.start
    content = wrap.module.text.content
    for node in wrap.module.every(cst.Name):
        inner = wrap.module.span(node)
        if node.value == name and span.holds(inner) and wrap.module.function(node) is function:
            parent = wrap.module.parent(node)
            if (isinstance(parent, cst.Attribute) and parent.attr is node) or (
                isinstance(parent, cst.Arg) and parent.keyword is node
            ):
                continue
            pieces += [content[at : inner.start], UNIT]
            at = inner.stop
    pieces.append(content[at : span.stop])
    body = "".join(pieces)
    loose = isinstance(function.body, (cst.IfExp, cst.Lambda, cst.NamedExpr)) or "\n" in body
    return (f"({body})",) if loose else (body,)


def _run_time_policy(draft: Draft, wrap: Wrap, value: Value) -> Line | None:
    """The policy as an expression at the wrap, for shard_by_policy; refuses the wrap where there is none."""
    origins = draft.flow.origins(value.module, value.node)
    called = [o for o in origins if o.kind == CALL and o.name in (SIZE, TRANSFORMER, LAMBDA, ALWAYS)]
    objects = [o for o in origins if o.kind == CALL and o.name in (_WRAP + "ModuleWrapPolicy", _WRAP + "CustomPolicy")]
    for origin in called:
        # A user error: the policy function called as if it were a factory. Read it as what was meant.
        _mend_direct_call(draft, wrap, origin)
    if any(o.name.endswith("CustomPolicy") for o in objects):
        wrap.plan.refuse("wrap-policy", "a CustomPolicy that may answer dicts: write the loop over the modules by hand")
        return None
    spelled = spell(draft, wrap, value)
    if spelled is None:
        wrap.plan.refuse("wrap-policy", f"the policy {value.module.code(value.node)} is out of reach at this call")
    return spelled


def _mend_direct_call(draft: Draft, wrap: Wrap, origin: Origin) -> None:
    call = origin.node
    if origin.module is not wrap.module or not isinstance(call, cst.Call) or any(a.keyword is None for a in call.args):
        wrap.plan.refuse(
            "wrap-policy", f"{origin.name.rpartition('.')[2]} is called, but it is a policy, not a policy factory"
        )
        return
    partial = draft.need("functools", "partial")
    module = draft.module
    first, last = module.span(call.args[0]), module.span(call.args[-1])
    arguments = type(first)(first.start, last.stop)
    if draft.replace(call, f"{partial}(", module.span(call.func), ", ", arguments, ")"):
        draft.note(
            call,
            Grade.NUMERICS,
            "a policy was called directly, which raises TypeError in FSDP1; read as a partial of it",
        )
