"""An optimizer that the sharding function is handed gets the sharded parameters in the place of the old ones.

What: where a function or constructor shards a model and takes, as a parameter, the optimizer that was made of it, the
names of the parameters are noted before the sharding, and the optimizer's groups (and its state, if it has one) are
given the sharded parameters behind it. A function for it is written into the file.

Why: `fully_shard` replaces parameters. The optimizer cannot be made later here, because its maker calls the function
that shards: `Trainer(model, optimizer)` with `self.model = DDP(model)` inside.

Before::

    def __init__(self, model, optimizer):
        self.model, self.optimizer = DDP(model), optimizer

After::

    def __init__(self, model, optimizer):
        names = {parameter: name for name, parameter in model.named_parameters()}
        fully_shard(model)
        rebind(optimizer, names, model)
        self.model, self.optimizer = model, optimizer

In numbers: equal.

Known limits: the optimizer must be one of torch's, in sight, and handed over under a name. Where it can be made behind
the sharding, the rule optimizer-order moves it.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..events import is_optimizer
from ..grade import Grade
from ..origin import CALL
from ..plan import MODEL, Order
from ..stale import owners, precedes
from ..wraps import Wrap

SOURCES = ("fsdp1", "ddp")

HELPER = '''def rebind(optimizer, names, model):
    """Let an optimizer that was made before the sharding step the sharded parameters, with the state that it has."""
    sharded = dict(model.named_parameters())

    def moved(value, parameter):
        if not isinstance(value, TORCH.Tensor) or value.shape != parameter.shape or not value.ndim:
            return value
        value = value.to(parameter.device)
        return DISTRIBUTE(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

    for group in optimizer.param_groups:
        old, group["params"] = group["params"], [sharded[names[parameter]] for parameter in group["params"]]
        for before, parameter in zip(old, group["params"]):
            state = optimizer.state.pop(before, {})
            if state:
                optimizer.state[parameter] = {key: moved(value, parameter) for key, value in state.items()}'''


def plan(draft: Draft, wrap: Wrap) -> None:
    """Note the names before the sharding, and rebind behind it."""
    function = draft.module.function(wrap.call)
    if not isinstance(function, cst.FunctionDef) or wrap.subject is None:
        return
    for parameter in (*function.params.params, *function.params.kwonly_params):
        calls = _made(draft, parameter.name)
        if not calls or not all(_holds(peer, call, wrap) for peer, call in calls):
            continue
        wrap.facts["rebound"] = {id(call) for _, call in calls}
        names = draft.fresh("names", "parameter_names")
        note = f"{names} = {{parameter: name for name, parameter in {MODEL}.named_parameters()}}"
        wrap.plan.step(Order.PREPARE, note)
        wrap.plan.step(Order.OPTIMIZER, f"{_helper(draft)}({parameter.name.value}, {names}, {MODEL})")
        message = f"{parameter.name.value} was made before the sharding and is given the sharded parameters"
        draft.note(wrap.call, Grade.EXACT, message)
        return


def _made(draft: Draft, name: cst.Name) -> list[tuple[Draft, cst.Call]]:
    """The calls that make the optimizer that a parameter holds; none where it may hold anything else."""
    found = []
    origins = draft.origins(name)
    for origin in origins:
        peer = draft.peers.get(id(origin.module))
        if origin.kind != CALL or not isinstance(origin.node, cst.Call) or peer is None:
            continue
        if is_optimizer(peer, origin.module, origin.node):
            found.append((peer, origin.node))
    return found if len(found) == len(origins) else []


def _holds(peer: Draft, call: cst.Call, wrap: Wrap) -> bool:
    return any(precedes(peer, call, owner, wrap) for owner in owners(peer, call))


def _helper(draft: Draft) -> str:
    if "rebind" not in draft.helpers:
        text = HELPER.replace("TORCH", draft.need_module("torch"))
        draft.helpers["rebind"] = text.replace(
            "DISTRIBUTE", draft.need("torch.distributed.tensor", "distribute_tensor")
        )
    return "rebind"
