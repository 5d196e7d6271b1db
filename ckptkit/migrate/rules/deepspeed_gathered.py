"""GatheredParameters becomes full tensors: of one parameter under a name, of a model by a context manager.

What: `with GatheredParameters(parameter)` goes; its body reads `parameter.full_tensor()` under a name. With
`modifier_rank` what that rank made of it is broadcast and put into the shards of all ranks. For `model.parameters()`
the body runs in `gathered(model, modifier_rank)`, which swaps whole parameters in and, where a rank may write, puts
them back. Both are functions written into the file. Before the model is sharded the context goes: parameters are whole
there, and rank 0's are broadcast. Where the body only runs the model, too: calling it gathers what it needs.

Why: a sharded parameter is a DTensor; indexing, printing or assigning it means the shards.

Before::

    with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        if rank == 0:
            model.head.weight.zero_()

After::

    whole_weight = model.head.weight.detach().full_tensor()
    if rank == 0:
        whole_weight.zero_()
    put_back(model.head.weight, whole_weight, 0)

In numbers: reading is equal in fp32; of a bf16 or fp16 engine DeepSpeed gathers the 16-bit copies, here it is the fp32
masters. What is written after `deepspeed.initialize` DeepSpeed forgets at the next update, because its fp32 masters do
not know of it; here it stays.

Known limits: where no deepspeed.initialize is in sight (the engine is a Trainer's) all stays, with a TODO. `enabled`
falls away, because FSDP2 shards at every stage. Lists of parameters that the body does not
name one by one (a list made elsewhere) are left with a TODO.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ..draft import Draft
from ..gathered import context, put_back
from ..grade import Grade
from ..syntax import argument_of, is_store
from ..wraps import Wrap

SOURCES = ("deepspeed",)
_GATHERED = (
    "deepspeed.zero.GatheredParameters",
    "deepspeed.runtime.zero.GatheredParameters",
    "deepspeed.runtime.zero.partition_parameters.GatheredParameters",
)
_PARAMETERS = ["params", "modifier_rank", "fwd_module", "enabled"]
_LEFT = "GatheredParameters: read with parameter.full_tensor() on all ranks, write with set_model_state_dict"


def rewrite(draft: Draft) -> None:
    """Rewrite every context, unless an engine stays."""
    wraps = [wrap for wrap in draft.all_wraps if wrap.source == "deepspeed"]
    if any(wrap.plan.refused for wrap in wraps):
        return
    for call in draft.calls(*_GATHERED):
        statement, item = draft.module.statement(call), draft.module.parent(call)
        alone = isinstance(statement, cst.With) and isinstance(item, cst.WithItem) and len(statement.items) == 1
        params = argument_of(call, _PARAMETERS, "params")
        if not wraps:
            draft.todo(call, f"the engine is made out of sight (by a Trainer?) and may stay; if not, {_LEFT}")
        elif not alone or params is None or not isinstance(statement, cst.With):
            draft.todo(call, _LEFT)
        elif wraps and all(_before(draft, call, wrap, 4) for wrap in wraps):
            _drop(draft, call, statement, "parameters are whole before the model is sharded: GatheredParameters goes")
        elif _runs_model(draft, statement):
            _drop(draft, call, statement, "calling a sharded model gathers its parameters: GatheredParameters goes")
        else:
            _write(draft, call, statement, params)


def _drop(draft: Draft, call: cst.Call, statement: cst.With, message: str) -> None:
    if not draft.unwrap(statement):
        draft.replace(call, f"{draft.need('contextlib', 'nullcontext')}()")
    draft.note(call, Grade.EXACT, message)


def _before(draft: Draft, node: cst.CSTNode, wrap: Wrap, depth: int) -> bool:
    """Whether a node runs before a wrap: it stands above it in its function, or all calls of its function do."""
    module, function = draft.module, draft.module.function(node)
    if module is wrap.module and function is module.function(wrap.call):
        return module.span(node).start < module.span(wrap.call).start and not draft.module.loops(wrap.call)
    if not isinstance(function, cst.FunctionDef) or depth == 0:
        return False
    callers = draft.flow.callers(module, function)
    peers = [(draft.peers.get(id(where)), call) for where, call in callers]
    return bool(peers) and all(peer is not None and _before(peer, call, wrap, depth - 1) for peer, call in peers)


def _runs_model(draft: Draft, statement: cst.With) -> bool:
    for call in draft.module.inside(statement.body, cst.Call):
        func = call.func
        if draft.wraps_of(func, "deepspeed"):
            return True
        runs = isinstance(func, cst.Attribute) and func.attr.value in ("generate", "forward")
        if runs and draft.wraps_of(func.value, "deepspeed"):  # type: ignore[attr-defined]
            return True
    return False


def _write(draft: Draft, call: cst.Call, statement: cst.With, params: cst.BaseExpression) -> None:
    rank = argument_of(call, _PARAMETERS, "modifier_rank")
    writes = rank is not None and draft.code(rank) != "None"
    model = _model(draft, params)
    if model is not None:
        last = (", ", *draft.module.quote(rank)) if writes and rank is not None else ()
        draft.replace(call, f"{context(draft)}(", *draft.module.quote(model), *last, ")")
        _note(draft, call, writes, "GatheredParameters becomes a context that swaps whole parameters in")
        return
    single = [params]
    if isinstance(params, (cst.List, cst.Tuple)):
        single = [element.value for element in params.elements]
    named = [node for node in single if isinstance(node, (cst.Name, cst.Attribute)) and _uses(draft, statement, node)]
    if not named or len(named) < len(single) or _is_list(draft, single) or not _keep_names(draft, statement, named):
        draft.todo(call, _LEFT)
        return
    if not isinstance(statement.body, cst.IndentedBlock) or not draft.unwrap(statement):
        draft.todo(call, _LEFT)
        return
    for node in named:
        code, quoted = draft.code(node), draft.module.quote(node)
        word = code.rpartition(".")[2]
        name = draft.throwaway(f"whole_{word}", f"gathered_{word}", value=code)
        for use in _uses(draft, statement, node):
            if not is_store(draft.module, use):
                draft.replace(use, name)
        draft.before(statement, (f"{name} = ", *quoted, ".detach().full_tensor()"))
        if writes and rank is not None:
            back = put_back(draft)
            draft.after(statement, (f"{back}(", *quoted, f", {name}, {draft.code(rank)})"), outside=True)
    _note(draft, call, writes, "the gathered parameter is its full tensor, under a name")


def _note(draft: Draft, call: cst.Call, writes: bool, message: str) -> None:
    if writes:
        message += "; what is written stays, where DeepSpeed's next update would bring back its fp32 master"
    draft.note(call, Grade.NUMERICS if writes else Grade.EXACT, message)


def _model(draft: Draft, params: cst.BaseExpression) -> cst.BaseExpression | None:
    """`x` of `x.parameters()`, also in `list(...)`."""
    at = params
    if isinstance(at, cst.Call) and draft.code(at.func) in ("list", "tuple") and len(at.args) == 1:
        at = at.args[0].value
    takes = isinstance(at, cst.Call) and isinstance(at.func, cst.Attribute) and at.func.attr.value == "parameters"
    return at.func.value if takes and isinstance(at, cst.Call) and isinstance(at.func, cst.Attribute) else None


def _keep_names(draft: Draft, statement: cst.With, named: Sequence[cst.BaseExpression]) -> bool:
    """Whether the body reads no parameter by a name that it has bound anew: `param = param.clone()` may come last."""
    for node in named:
        uses = _uses(draft, statement, node)
        stores = [use for use in uses if is_store(draft.module, use)]
        if len(stores) > 1 or any(isinstance(draft.module.statement(use), cst.AugAssign) for use in stores):
            return False
        last = draft.module.span(draft.module.statement(stores[0])).stop if stores else None
        if last is not None and any(draft.module.span(use).start >= last for use in uses):
            return False
    return True


def _is_list(draft: Draft, single: list[cst.BaseExpression]) -> bool:
    """Whether what is given is itself a list of parameters, as far as the text tells."""
    origins = [origin for node in single for origin in draft.origins(node)]
    return any(isinstance(origin.node, (cst.List, cst.Tuple, cst.ListComp)) for origin in origins)


def _uses(draft: Draft, statement: cst.With, node: cst.BaseExpression) -> list[cst.CSTNode]:
    """Where the body names a parameter."""
    code, module = draft.code(node), draft.module
    found: list[cst.CSTNode] = []
    for use in module.inside(statement.body, cst.Name, cst.Attribute):
        holder = module.parent(use)
        is_label = (isinstance(holder, cst.Attribute) and holder.attr is use) or (
            isinstance(holder, cst.Arg) and holder.keyword is use
        )
        if draft.code(use) == code and not is_label:
            found.append(use)
    return found
