"""state_dict and load_state_dict of a sharded model become get_model_state_dict and set_model_state_dict.

What: `FSDP.state_dict_type(...)` contexts and `set_state_dict_type` go; each `model.state_dict()` and
`model.load_state_dict(sd)` says by itself which kind it means. A call that stands under `if rank == 0:` is hoisted
out, because all ranks must take part.

Why: `model.state_dict()` changes its meaning without a word: whole tensors with FSDP1's default, sharded DTensors
with FSDP2, under equal keys. Code downstream works on, and writes other files.

Before::

    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()

After::

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

In numbers: equal.

A function that gathers a DDP model's state and was called under `if rank == 0:` only is called by all ranks: the guard
goes from the calls, and `if dist.get_rank() != 0: return` stands behind what is gathered. Where the calls cannot be
taken out of their guards, or the function does more than assign above it, a TODO stands at the calls.

With DDP the names of `model.state_dict()` had the prefix `module.`; those of the sharded model have none. Loading
takes old files as well.

Programs that compile their models (`torch.compile(model)`) saved names with `_orig_mod.` in them; the state dicts of
now have clean ones, and `uncompiled`, a function written into the file, takes old files as well.

Known limits: FSDP2 knows no full state on the CPU of all ranks: offload_to_cpu=True without rank0_only stays on the
device (performance). LOCAL_STATE_DICT has no counterpart: convert such files with `ckptkit convert`. Sharded
checkpoints that torch.save wrote hold ShardedTensors; load them through torch.distributed.checkpoint.
"""

from __future__ import annotations

import re

import libcst as cst

from ..draft import Draft
from ..gather import gather, hoist, of_one_rank, report_guarded_callers
from ..grade import Grade
from ..models import compiles
from ..names import FSDP
from ..plan import Line
from ..ranks import asks_each_node, rank_guard
from ..replicas import replicated
from ..resharding import for_loading
from ..state import (
    CONTEXT,
    GETTER,
    SETTER,
    STATE,
    Kind,
    carriers,
    kind_at,
    may_be_none,
    model_of,
    only_on_rank_0,
    options,
    read,
    settings,
)
from ..syntax import argument_of
from ..wraps import Wrap

SOURCES = ("fsdp1", "ddp", "deepspeed")
_TAKES_STATE = re.compile(r"(?:save|load)_(?:model|pretrained|state|checkpoint)$")

UNCOMPILED = '''def uncompiled(state):
    """A state dict without the prefix that torch.compile put before its names; files of now have none."""
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}'''
UNPREFIXED = '''def unprefixed(state):
    """A state dict without the prefix that DDP put before its names; files of now have none."""
    return {name.removeprefix("module."): value for name, value in state.items()}'''


def rewrite(draft: Draft) -> None:
    """Rewrite contexts, saving and loading."""
    _parts(draft)
    _saves(draft)
    _loads(draft)
    _contexts(draft)


def _calls(draft: Draft, name: str) -> list[tuple[cst.Call, list[Wrap]]]:
    """Calls of a method on sharded models, and on the model that a state_dict_type context around them names."""
    found = draft.methods(name, sources=SOURCES)
    known = {id(call) for call, _ in found}
    for call in draft.module.every(cst.Call):
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value == name and id(call) not in known:
            wraps = [] if draft.module.skips(call) else replicated(draft, func.value)
            if wraps:
                found.append((call, wraps))
    for context in settings(draft, CONTEXT):
        model, statement = model_of(draft, context), draft.module.statement(context)
        if model is None or not isinstance(statement, cst.With) or not draft.is_migrated(model):
            continue
        for call in draft.module.inside(statement, cst.Call):
            func = call.func
            is_mine = isinstance(func, cst.Attribute) and func.attr.value == name and id(call) not in known
            if is_mine and draft.code(func.value) == draft.code(model):  # type: ignore[attr-defined]
                found.append((call, []))
    return [(call, wraps) for call, wraps in found if not _in_context_that_stays(draft, call)]


def _in_context_that_stays(draft: Draft, call: cst.Call) -> bool:
    """Whether a call lies in a state_dict_type context of a model whose wrap was left: it means what that says."""
    for context in settings(draft, CONTEXT):
        statement, model = draft.module.statement(context), model_of(draft, context)
        inside = isinstance(statement, cst.With) and draft.module.within(call, statement.body)
        if inside and (model is None or not draft.is_migrated(model)):
            return True
    return False


def _parts(draft: Draft) -> None:
    """Leave a TODO where the state of a part of a sharded model is asked for, and where transformers writes it."""
    for call in draft.module.every(cst.Call):
        func = call.func
        if not isinstance(func, cst.Attribute) or draft.module.skips(call):
            continue
        given = {argument.keyword.value for argument in call.args if argument.keyword is not None}
        writes = func.attr.value in ("save_pretrained", "push_to_hub") and "state_dict" not in given
        if func.attr.value in ("state_dict", "load_state_dict"):
            unknown = all(origin.name == "builtins.getattr" for origin in draft.origins(func.value))
            if (unknown or isinstance(func.value, cst.Subscript)) and _is_part(draft, func.value):
                draft.todo(call, "a part of a sharded model holds shards: use get_/set_model_state_dict on all ranks")
        elif writes and draft.wraps_of(func.value, *SOURCES):
            draft.todo(call, f"{func.attr.value} would write shards: give it state_dict=get_model_state_dict(...)")


def _is_part(draft: Draft, node: cst.BaseExpression) -> bool:
    """Whether an expression is `model.part`, `model.parts[0]` or `getattr(model, name)` of a sharded model."""
    at = node
    while True:
        if isinstance(at, (cst.Attribute, cst.Subscript)):
            at = at.value
        elif isinstance(at, cst.Call) and draft.name(at.func) == "builtins.getattr" and at.args:
            at = at.args[0].value
        else:
            return False
        if draft.wraps_of(at, *SOURCES):
            return True


def _saves(draft: Draft) -> None:
    for call, wraps in _calls(draft, "state_dict"):
        assert isinstance(call.func, cst.Attribute)
        if call.args:
            draft.todo(call, "state_dict with arguments: use get_model_state_dict with StateDictOptions")
            continue
        kind = kind_at(draft, call) if not wraps or any(w.source == "fsdp1" for w in wraps) else Kind()
        if kind.left:
            draft.todo(call, _unknown(kind))
            continue
        get = draft.need(STATE, "get_model_state_dict")
        arguments = kind.model_options()
        guard = rank_guard(draft, call)
        if guard is not None and kind.name == "FULL" and not asks_each_node(draft.code(guard.test)):
            arguments = ["full_state_dict=True", "cpu_offload=True"]
        replicas = any(wrap.source in ("ddp", "deepspeed") for wrap in wraps)
        if replicas and guard is None and of_one_rank(draft, call):
            arguments = ["full_state_dict=True", "cpu_offload=True"]
        pieces = (f"{get}(", *draft.module.quote(call.func.value), *options(draft, arguments), ")")
        if replicas and guard is None:
            gather(draft, call, pieces, "model_state", "state_dict becomes get_model_state_dict (full)")
            continue
        if replicas:
            report_guarded_callers(draft, call)
        if guard is not None:
            _hoist(draft, call, guard, pieces)
            continue
        draft.replace(call, *pieces)
        if kind.name == "FULL" and kind.offload and not kind.rank0:
            draft.note(
                call, Grade.PERFORMANCE, "a full state on the CPU of all ranks is not to be had: it stays on the device"
            )
        else:
            draft.note(call, Grade.EXACT, f"state_dict becomes get_model_state_dict ({kind.name.lower()})")


def _hoist(draft: Draft, call: cst.Call, guard: cst.If, pieces: tuple) -> None:
    """Make the state dict before the rank guard, under a name of its own."""
    statement = draft.module.statement(call)
    name = draft.fresh("model_state", "full_state")
    is_value = isinstance(statement, cst.Assign) and statement.value is call and len(statement.targets) == 1
    target = statement.targets[0].target if isinstance(statement, cst.Assign) else None
    if is_value and isinstance(target, cst.Name):
        name = target.value
        draft.delete(statement)
    else:
        draft.replace(call, name)
    hoist(draft, guard, call, (f"{name} = ", *pieces))
    draft.note(call, Grade.EXACT, "all ranks take part in gathering the state: hoisted out of the rank guard")


def _loads(draft: Draft) -> None:
    for call, wraps in _calls(draft, "load_state_dict"):
        assert isinstance(call.func, cst.Attribute)
        state = argument_of(call, ["state_dict", "strict"], "state_dict")
        if state is None:
            continue
        kind = kind_at(draft, call) if not wraps or any(w.source == "fsdp1" for w in wraps) else Kind()
        if kind.left:
            draft.todo(call, _unknown(kind))
            continue
        arguments: list[str | Line] = []
        quoted = draft.module.quote(state)
        if kind.name == "CHOSEN":
            arguments.append(kind.is_full)
        if kind.name == "FULL":
            arguments.append("full_state_dict=True")
            if only_on_rank_0(draft, state):
                arguments.append("broadcast_from_rank0=True")
                if may_be_none(draft, state):
                    quoted = (*quoted, " or {}")
        strict = argument_of(call, ["state_dict", "strict"], "strict")
        if strict is not None and draft.code(strict) != "True":
            arguments.append(f"strict={draft.code(strict)}")
        if kind.name == "FULL" and compiles(draft):
            draft.helpers.setdefault("uncompiled", UNCOMPILED)
            quoted = ("uncompiled(", *quoted, ")")
        if any(w.source == "ddp" for w in wraps) and _is_wrapper(draft, call.func.value):
            draft.helpers.setdefault("unprefixed", UNPREFIXED)
            quoted = ("unprefixed(", *quoted, ")")
        load = draft.need(STATE, "set_model_state_dict")
        model = for_loading(draft, call, draft.module.quote(call.func.value))
        draft.replace(call, f"{load}(", *model, ", ", *quoted, *options(draft, arguments), ")")
        draft.note(call, Grade.EXACT, f"load_state_dict becomes set_model_state_dict ({kind.name.lower()})")


def _is_wrapper(draft: Draft, model: cst.BaseExpression) -> bool:
    """Whether an expression holds DDP's wrapper, whose state had a prefix, and not the module in it."""
    inner = isinstance(model, cst.Attribute) and model.attr.value == "module"
    return not inner and bool(draft.wraps_of(model, "ddp"))


def _contexts(draft: Draft) -> None:
    for call in settings(draft, CONTEXT):
        kind = read(draft, call)
        model = model_of(draft, call)
        if model is None or not draft.is_migrated(model):
            continue
        statement = draft.module.statement(call)
        item = draft.module.parent(call)
        enters = isinstance(statement, cst.With) and isinstance(item, cst.WithItem)
        if kind.left and not (enters and _asks_no_state(draft, statement)):
            draft.todo(call, _unknown(kind))
            continue
        if enters and _saves_out_of_sight(draft, statement):
            draft.todo(call, "out of sight: give what saves or loads here get_model_state_dict's state")
            continue
        draft.sweepable += carriers(draft, call)
        alone = isinstance(statement, cst.With) and enters and len(statement.items) == 1
        if alone and draft.unwrap(statement):  # type: ignore[arg-type]
            draft.note(call, Grade.EXACT, "the state_dict_type context goes: each call says its own kind")
        else:
            nothing = draft.need("contextlib", "nullcontext")
            draft.replace(call, f"{nothing}()")
            draft.note(call, Grade.EXACT, "the state_dict_type context does nothing now: each call says its own kind")
    for call in settings(draft, SETTER):
        kind = read(draft, call)
        model = model_of(draft, call)
        if model is None or not draft.is_migrated(model):
            continue
        draft.sweepable += carriers(draft, call)
        if not kind.name:
            draft.todo(call, _unknown(kind))
        elif isinstance(draft.module.parent(call), cst.Expr):
            draft.delete(call)
            draft.note(call, Grade.EXACT, "set_state_dict_type goes: each call says its own kind")
    _answers(draft)


def _saves_out_of_sight(draft: Draft, statement: cst.CSTNode) -> bool:
    """Whether a context is there for a method that takes the state out of sight, as a Trainer's `save_model` does."""
    calls = draft.module.inside(statement.body, cst.Call)  # type: ignore[attr-defined]
    funcs = [call.func for call in calls if isinstance(call.func, cst.Attribute)]
    return any(_TAKES_STATE.match(func.attr.value) and not draft.origins(func) for func in funcs)


def _asks_no_state(draft: Draft, statement: cst.CSTNode) -> bool:
    """Whether the body of a context takes no state of a model, as far as its text shows: it may hold the optimizer's
    only.
    """
    for call in draft.module.inside(statement.body, cst.Call):  # type: ignore[attr-defined]
        if not isinstance(call.func, cst.Attribute):
            if not draft.origins(call.func):
                return False
            continue
        if call.func.attr.value not in ("state_dict", "load_state_dict", "load", "save", "forward"):
            continue
        held = {origin.name for origin in draft.origins(call.func.value)}
        if not held or not all(name.startswith("torch") for name in held) or held & {FSDP}:
            return False
    return True


def _answers(draft: Draft) -> None:
    """`old = set_state_dict_type(...)` and `old = get_state_dict_type(...)` go where they only serve to be restored."""
    calls = [*settings(draft, SETTER), *settings(draft, GETTER)]
    for call in calls:
        model = model_of(draft, call)
        statement = draft.module.statement(call)
        if model is None or not draft.is_migrated(model) or statement in draft.deleted:
            continue
        if isinstance(statement, cst.Expr) and call in settings(draft, GETTER):
            draft.delete(call)
        elif isinstance(statement, cst.Assign) and statement.value is call:
            target = statement.targets[0].target
            scope = draft.module.scope(target)
            if isinstance(target, cst.Name) and scope and not any(a.references for a in scope[target.value]):
                draft.delete(call)
            draft.sweepable.append(statement)
        else:
            continue
        draft.note(call, Grade.EXACT, "there is no state dict type to ask for or to restore: each call says its own")


def _unknown(kind: Kind) -> str:
    if kind.name == "LOCAL":
        return (
            "LOCAL_STATE_DICT (flat, one file a rank) has no counterpart: save {'model': get_model_state_dict(model)} "
            "with torch.distributed.checkpoint, load it so, and convert old files with ckptkit convert --to dcp"
        )
    return "which kind of state dict this is, is only known at run time: use get_/set_model_state_dict with options"
