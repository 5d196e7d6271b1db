"""optimizer.state_dict() of a DDP model's optimizer becomes get_optimizer_state_dict, load_state_dict its counterpart.

What: saving gathers the whole state by parameter names, outside of rank guards; loading takes files of both kinds: the
names of now and the parameter numbers of before.

Why: the optimizer of a sharded model holds shards. Its own `state_dict()` would write each rank's, under numbers.

Before::

    if rank == 0:
        torch.save({"optimizer": optimizer.state_dict()}, path)
    optimizer.load_state_dict(checkpoint["optimizer"])

After::

    optimizer_state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"optimizer": optimizer_state}, path)
    set_optimizer_state_dict(
        model, optimizer, named_state(model, optimizer, checkpoint["optimizer"]),
        options=StateDictOptions(full_state_dict=True))

In numbers: equal.

Known limits: the optimizer must be made from `model.parameters()` where the rule can see it.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..gather import gather, of_one_rank
from ..grade import Grade
from ..replicas import model_near, steps_replicas
from ..resharding import for_saving
from ..state import STATE, options
from ..syntax import argument_of

SOURCES = ("ddp",)

HELPER = '''def named_state(model, optimizer, state):
    """An optimizer state by parameter names, also of a file that numbers the parameters as `state_dict()` does."""
    if any(isinstance(key, str) for group in state["param_groups"] for key in group["params"]):
        return state
    names = {id(parameter): name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": {order[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }'''


def rewrite(draft: Draft) -> None:
    """Rewrite both directions."""
    for call in draft.module.every(cst.Call):
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in ("state_dict", "load_state_dict"):
            continue
        if draft.module.skips(call) or not steps_replicas(draft, func.value):
            continue
        model = model_near(draft, call, func.value)
        if model is None:
            draft.todo(
                call, "the optimizer holds shards: use get_/set_optimizer_state_dict, which take the model as well"
            )
        elif func.attr.value == "state_dict" and not call.args:
            _save(draft, call, func.value, model)
        elif func.attr.value == "load_state_dict":
            _load(draft, call, func.value, model)


def _save(draft: Draft, call: cst.Call, optimizer: cst.BaseExpression, model: cst.BaseExpression) -> None:
    get = draft.need(STATE, "get_optimizer_state_dict")
    on_rank_0 = ["cpu_offload=True"] if of_one_rank(draft, call) else []
    arguments = options(draft, ["full_state_dict=True", *on_rank_0])
    named = for_saving(draft, call, model, (draft.code(model),))
    pieces = (f"{get}(", *named, ", ", *draft.module.quote(optimizer), *arguments, ")")
    gather(draft, call, pieces, "optimizer_state", "the optimizer's state is gathered by parameter names")


def _load(draft: Draft, call: cst.Call, optimizer: cst.BaseExpression, model: cst.BaseExpression) -> None:
    state = argument_of(call, ["state_dict"], "state_dict")
    if state is None:
        return
    load = draft.need(STATE, "set_optimizer_state_dict")
    if "named_state" not in draft.helpers:
        draft.helpers["named_state"] = HELPER
    name, quote = draft.code(model), draft.module.quote
    arguments = options(draft, ["full_state_dict=True"])
    draft.replace(
        call,
        f"{load}({name}, ",
        *quote(optimizer),
        f", named_state({name}, ",
        *quote(optimizer),
        ", ",
        *quote(state),
        ")",
        *arguments,
        ")",
    )
    draft.note(call, Grade.EXACT, "the optimizer's state is loaded by names, from old files too")
