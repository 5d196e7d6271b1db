"""FSDP's optimizer state dict functions become get_optimizer_state_dict and set_optimizer_state_dict.

What: optim_state_dict, full_optim_state_dict and sharded_optim_state_dict become `get_optimizer_state_dict`;
optim_state_dict_to_load, scatter_full_optim_state_dict, shard_full_optim_state_dict and
flatten_sharded_optim_state_dict, with the `optimizer.load_state_dict` that takes their result, become one
`set_optimizer_state_dict`. Where that load is out of sight (the converted state is returned, or handed on), the call
becomes `optimizer_state_to_load(model, optimizer, state)`, a function written into the file, which loads and answers
what a later `optimizer.load_state_dict` takes. rekey_optim_state_dict becomes `rekeyed`, a function written into the
file: files of a plain optimizer count parameters, and set_optimizer_state_dict takes names. Calls under a rank guard
are hoisted out of it.

Why: the functions are FSDP1's; the plain `optimizer.state_dict()` of a sharded model holds DTensors under numbers.

Before::

    osd = FSDP.optim_state_dict_to_load(model, optimizer, torch.load(path))
    optimizer.load_state_dict(osd)

After::

    osd = torch.load(path)
    set_optimizer_state_dict(model, optimizer, osd, options=StateDictOptions(full_state_dict=True))

Of programs without use_orig_params=True a full state goes through `own_steps`, a function written into the file: all
parameters of an FSDP1 unit had one step, which their files hold as one tensor, and which a loaded optimizer would
count up once for each of them.

In numbers: equal; the keys are the same set, in another order.

Known limits: a plain `optimizer.state_dict()` on a sharded model, saved by torch.save, is a rank's own shard in FSDP1
as in FSDP2 and is left alone. The old argument order `optim_state_dict_to_load(osd, model, optimizer)` is recognised
by what is passed. `optimizer_state_to_load` changes the optimizer at once, not only when its answer is loaded. A
scatter_full_optim_state_dict that names no optimizer, and whose result no load of the program takes, gets a TODO.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..edit import Piece
from ..grade import Grade
from ..models import compiles, literal
from ..names import FSDP
from ..origin import CALL
from ..plan import Line
from ..ranks import asks_each_node, rank_guard
from ..resharding import for_saving
from ..state import STATE, kind_at, may_be_none, only_on_rank_0, options
from ..syntax import argument_of

SOURCES = ("fsdp1",)
_GET = {
    "optim_state_dict": ["model", "optim", "optim_state_dict", "group"],
    "full_optim_state_dict": ["model", "optim", "optim_input", "rank0_only", "group"],
    "sharded_optim_state_dict": ["model", "optim", "group"],
}
_LOAD = {
    "optim_state_dict_to_load": (["model", "optim", "optim_state_dict"], "optim_state_dict"),
    "scatter_full_optim_state_dict": (
        ["full_optim_state_dict", "model", "optim_input", "optim"],
        "full_optim_state_dict",
    ),
    "shard_full_optim_state_dict": (
        ["full_optim_state_dict", "model", "optim_input", "optim"],
        "full_optim_state_dict",
    ),
    "flatten_sharded_optim_state_dict": (["sharded_optim_state_dict", "model", "optim"], "sharded_optim_state_dict"),
}
TO_LOAD = '''def optimizer_state_to_load(model, optimizer, state, **options):
    """Load an optimizer's state by parameter names; answers it as `optimizer.load_state_dict` takes it."""
    SET(model, optimizer, state, options=OPTIONS(**options))
    return optimizer.state_dict()'''
RENAMED = '''def renamed(state):
    """An optimizer state without the prefix that torch.compile put before its names; files of now have none."""
    if not state:
        return state
    groups = [
        {**group, "params": [name.replace("_orig_mod.", "") for name in group["params"]]}
        for group in state["param_groups"]
    ]
    values = {name.replace("_orig_mod.", ""): value for name, value in state["state"].items()}
    return {"state": values, "param_groups": groups}'''
OWN_STEPS = '''def own_steps(state):
    """An optimizer state that FSDP1 wrote, with a step for each parameter: those of one unit shared a tensor."""
    for values in state.get("state", {}).values():
        if "step" in values:
            values["step"] = DEEPCOPY(values["step"])
    return state'''
REKEYED = '''def rekeyed(state, model, optimizer=None, to_names=True):
    """An optimizer's state with names of parameters for keys in the place of numbers, or the other way round."""
    names = {param: name for name, param in model.named_parameters()}
    params = list(names) if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    keys = {number: names[param] for number, param in enumerate(params)}
    if not to_names:
        keys = {name: number for number, name in keys.items()}
    groups = [{**group, "params": sorted(keys[key] for key in group["params"])} for group in state["param_groups"]]
    return {"state": {keys[key]: value for key, value in state["state"].items()}, "param_groups": groups}'''
_LEFT = (
    "which kind of optimizer state this is, is only known at run time (or it is LOCAL_STATE_DICT, which has no "
    "counterpart): use get_/set_optimizer_state_dict with StateDictOptions"
)
_LOAD_SHARDED = "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict"


def rewrite(draft: Draft) -> None:
    """Rewrite saving, converting and loading."""
    for name, parameters in _GET.items():
        for call in draft.calls(f"{FSDP}.{name}"):
            _get(draft, call, name, parameters)
    converted: dict[int, tuple[cst.Call, str]] = {}
    for name in _LOAD:
        for call in draft.calls(f"{FSDP}.{name}"):
            converted[id(call)] = (call, name)
    loads = _loads(draft, converted)
    for call, name in converted.values():
        _convert(draft, call, name, loads)
    for call in draft.calls(f"{FSDP}.rekey_optim_state_dict"):
        _rekey(draft, call)
    for call in draft.calls(_LOAD_SHARDED):
        _load_sharded(draft, call, converted)


def _get(draft: Draft, call: cst.Call, name: str, parameters: list[str]) -> None:
    model = argument_of(call, parameters, "model")
    optimizer = argument_of(call, parameters, "optim")
    if model is None or optimizer is None or not draft.is_migrated(model):
        return
    given = argument_of(call, parameters, "optim_state_dict")
    if given is not None and draft.code(given) not in ("None", f"{draft.code(optimizer)}.state_dict()"):
        draft.todo(call, "optim_state_dict of a given state dict: use get_optimizer_state_dict on the optimizer")
        return
    arguments: list[str | Line]
    if name == "full_optim_state_dict":
        rank0 = argument_of(call, parameters, "rank0_only")
        on_all = rank0 is not None and draft.code(rank0) == "False"
        arguments = ["full_state_dict=True", *([] if on_all else ["cpu_offload=True"])]
        full = True
    elif name == "sharded_optim_state_dict":
        arguments, full = [], False
    else:
        kind = kind_at(draft, call)
        if kind.left:
            draft.todo(call, _LEFT)
            return
        arguments, full = kind.optimizer_options(), kind.name == "FULL"
        if full and kind.optim_offload and not kind.optim_rank0:
            draft.note(
                call, Grade.PERFORMANCE, "a full state on the CPU of all ranks is not to be had: it stays on the device"
            )
    guard = rank_guard(draft, call)
    if guard is not None and full and not asks_each_node(draft.code(guard.test)):
        arguments = ["full_state_dict=True", "cpu_offload=True"]
    get = draft.need(STATE, "get_optimizer_state_dict")
    quote = draft.module.quote
    named = for_saving(draft, call, model, quote(model))
    pieces = (f"{get}(", *named, ", ", *quote(optimizer), *options(draft, arguments), ")")
    if guard is not None:
        name = draft.fresh("optimizer_state", "full_optimizer_state")
        statement = draft.module.statement(call)
        target = statement.targets[0].target if isinstance(statement, cst.Assign) and statement.value is call else None
        if isinstance(target, cst.Name):
            name = target.value
            draft.delete(statement)
        else:
            draft.replace(call, name)
        draft.before(guard, (f"{name} = ", *pieces))
        draft.note(call, Grade.EXACT, "all ranks take part in gathering the state: hoisted out of the rank guard")
        return
    draft.replace(call, *pieces)
    draft.note(call, Grade.EXACT, f"{name} becomes get_optimizer_state_dict")


def _roles(draft: Draft, call: cst.Call, name: str) -> tuple[cst.BaseExpression | None, ...]:
    """(model, optimizer, state) of a converting call; by what is passed where the old positional order is possible."""
    parameters, key = _LOAD[name]
    if name == "optim_state_dict_to_load" and len(call.args) >= 3 and not any(a.keyword for a in call.args[:3]):
        first, second, third = (argument.value for argument in call.args[:3])
        wraps = {id(wrap.call) for wrap in draft.all_wraps}
        wrapped = [any(id(o.node) in wraps for o in draft.origins(node)) for node in (first, second)]
        if wrapped == [False, True] or ("state" in draft.code(first) and "state" not in draft.code(third)):
            return second, third, first
    return (
        argument_of(call, parameters, "model"),
        argument_of(call, parameters, "optim"),
        argument_of(call, parameters, key),
    )


def _loads(draft: Draft, converted: dict[int, tuple[cst.Call, str]]) -> dict[int, cst.Call]:
    """Converting call -> the `optimizer.load_state_dict` that takes its result; both are rewritten together."""
    found = {}
    for load in draft.module.every(cst.Call):
        if not isinstance(load.func, cst.Attribute) or load.func.attr.value != "load_state_dict" or not load.args:
            continue
        for origin in draft.origins(load.args[0].value):
            # Elsewhere the names of the model and the optimizer may mean others.
            same = draft.module.function(load) is draft.module.function(origin.node)
            if id(origin.node) in converted and origin.kind == CALL and same:
                found[id(origin.node)] = load
    for key, load in list(found.items()):
        call, name = converted[key]
        model, _, state = _roles(draft, call, name)
        if model is None or state is None or not draft.is_migrated(model):
            continue
        assert isinstance(load.func, cst.Attribute)
        arguments = _load_options(draft, call, name, state)
        if arguments is None:
            draft.todo(load, _LEFT)
            del found[key]
            continue
        quoted = draft.module.quote(load.args[0].value)
        if "broadcast_from_rank0=True" in arguments and may_be_none(draft, state):
            quoted = (*quoted, " or {}")
        if arguments:
            quoted = _owned(draft, quoted)
        put = draft.need(STATE, "set_optimizer_state_dict")
        quote = draft.module.quote
        pieces = (
            f"{put}(",
            *quote(model),
            ", ",
            *quote(load.func.value),
            ", ",
            *quoted,
            *options(draft, arguments),
            ")",
        )
        draft.replace(load, *pieces)
        draft.note(load, Grade.EXACT, "set_optimizer_state_dict converts and loads")
    return found


def _owned(draft: Draft, state: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """A full state whose steps are nobody else's, by the names that parameters have without torch.compile.

    Without use_orig_params FSDP1 kept one step for a flat parameter, and wrote that tensor for each of its parameters
    (torch 2.13 torch/distributed/fsdp/_optim_utils.py, `_unflatten_optim_state`). torch.save keeps that they are one,
    and an optimizer that loads them counts the one up for each.
    """
    if compiles(draft):
        draft.helpers.setdefault("renamed", RENAMED)
        state = ("renamed(", *state, ")")
    wraps = [wrap for wrap in draft.all_wraps if wrap.source == "fsdp1"]
    if all(literal(draft, wrap.args.get("use_orig_params")) is True for wrap in wraps):
        return state
    if "own_steps" not in draft.helpers:
        draft.helpers["own_steps"] = OWN_STEPS.replace("DEEPCOPY", draft.need("copy", "deepcopy"))
    return ("own_steps(", *state, ")")


def _load_options(draft: Draft, call: cst.Call, name: str, state: cst.BaseExpression) -> list[str | Line] | None:
    """Arguments of StateDictOptions for loading what a converting call was given; None where only the run tells."""
    if name == "scatter_full_optim_state_dict":
        return ["full_state_dict=True", "broadcast_from_rank0=True"]
    if name == "shard_full_optim_state_dict":
        return ["full_state_dict=True"]
    if name == "flatten_sharded_optim_state_dict":
        return []
    kind = kind_at(draft, call)
    if kind.left:
        return None
    if kind.name == "CHOSEN":
        return [kind.is_full]
    if kind.name != "FULL":
        return []
    broadcast = kind.optim_rank0 or only_on_rank_0(draft, state)
    return ["full_state_dict=True", *(["broadcast_from_rank0=True"] if broadcast else [])]


def _convert(draft: Draft, call: cst.Call, name: str, loads: dict[int, cst.Call]) -> None:
    model, optimizer, state = _roles(draft, call, name)
    if model is None or state is None or not draft.is_migrated(model):
        return  # left over: the generic check reports it
    if id(call) not in loads:
        _load_at_once(draft, call, name, model, optimizer, state)
        return
    statement = draft.module.statement(call)
    whole = isinstance(statement, cst.Assign) and statement.value is call and len(statement.targets) == 1
    if whole and draft.code(statement.targets[0].target) == draft.code(state):  # type: ignore[union-attr]
        draft.delete(statement)
        return
    draft.replace(call, *draft.module.quote(state))


def _load_at_once(
    draft: Draft,
    call: cst.Call,
    name: str,
    model: cst.BaseExpression,
    optimizer: cst.BaseExpression | None,
    state: cst.BaseExpression,
) -> None:
    """For a conversion whose `optimizer.load_state_dict` is out of sight."""
    arguments = _load_options(draft, call, name, state)
    if arguments is None:
        draft.todo(call, _LEFT)
        return
    if optimizer is None:
        wanted = ", ".join(one if isinstance(one, str) else "".join(map(draft.text, one)) for one in arguments)
        draft.todo(
            call,
            f"take this and the optimizer.load_state_dict of its result together as set_optimizer_state_dict("
            f"model, optimizer, {draft.code(state)} or {{}}, options=StateDictOptions({wanted}))",
        )
        return
    if "optimizer_state_to_load" not in draft.helpers:
        text = TO_LOAD.replace("SET", draft.need(STATE, "set_optimizer_state_dict"))
        draft.helpers["optimizer_state_to_load"] = text.replace("OPTIONS", draft.need(STATE, "StateDictOptions"))
    quote = draft.module.quote
    loaded: list[Piece] = [*quote(state)]
    if "broadcast_from_rank0=True" in arguments and may_be_none(draft, state):
        loaded.append(" or {}")
    pieces: list[Piece] = ["optimizer_state_to_load(", *quote(model), ", ", *quote(optimizer), ", "]
    pieces += _owned(draft, tuple(loaded)) if arguments else loaded
    for argument in arguments:
        pieces += [", ", *((argument,) if isinstance(argument, str) else argument)]
    draft.replace(call, *pieces, ")")
    draft.note(call, Grade.EXACT, "the state is loaded here, and answered for a load that is out of sight")


def _rekey(draft: Draft, call: cst.Call) -> None:
    parameters = ["optim_state_dict", "optim_state_key_type", "model", "optim_input", "optim"]
    state, kind, model, given, optimizer = (argument_of(call, parameters, name) for name in parameters)
    if state is None or model is None or not draft.is_migrated(model):
        return
    wanted = draft.name(kind).rpartition(".")[2] if kind is not None else ""
    if wanted not in ("PARAM_NAME", "PARAM_ID") or given is not None:
        draft.todo(call, "give the state names for keys by hand: set_optimizer_state_dict takes names of parameters")
        return
    draft.helpers.setdefault("rekeyed", REKEYED)
    quote = draft.module.quote
    which = (", optimizer=", *quote(optimizer)) if optimizer is not None else ()
    way = "" if wanted == "PARAM_NAME" else ", to_names=False"
    draft.replace(call, "rekeyed(", *quote(state), ", ", *quote(model), *which, f"{way})")
    draft.note(call, Grade.EXACT, "rekey_optim_state_dict becomes a function of the file")


def _load_sharded(draft: Draft, call: cst.Call, converted: dict[int, tuple[cst.Call, str]]) -> None:
    """`osd = load_sharded_optimizer_state_dict(...)` becomes a state to load into, and dcp.load."""
    parameters = ["model_state_dict", "optimizer_key", "storage_reader", "planner"]
    key = argument_of(call, parameters, "optimizer_key")
    reader = argument_of(call, parameters, "storage_reader")
    statement = draft.module.statement(call)
    function = draft.module.function(call)
    users = [
        (c, n)
        for c, n in converted.values()
        if draft.module.function(c) is function and n == "optim_state_dict_to_load"
    ]
    target = statement.targets[0].target if isinstance(statement, cst.Assign) and statement.value is call else None
    if not users or key is None or reader is None or not isinstance(target, cst.Name):
        draft.todo(
            call,
            "load_sharded_optimizer_state_dict: load into get_optimizer_state_dict(model, optimizer) with dcp.load",
        )
        return
    model, optimizer, _ = _roles(draft, *users[0])
    if model is None or optimizer is None:
        return
    get = draft.need(STATE, "get_optimizer_state_dict")
    dcp = draft.need_module("torch.distributed.checkpoint", "dcp")
    quote = draft.module.quote
    draft.statement_becomes(
        statement,
        [
            (f"{target.value} = {{", *quote(key), f": {get}(", *quote(model), ", ", *quote(optimizer), ")}"),
            (f"{dcp}.load({target.value}, storage_reader=", *quote(reader), ")"),
        ],
    )
    draft.note(call, Grade.EXACT, "the sharded optimizer state is loaded by dcp.load into the state of this run")
