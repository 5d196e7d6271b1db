"""Attributes and methods that only FSDP1's wrapper had: apply, rank, world_size, process_group, compute_device, ...

What: `model.apply(fn)` on a sharded model runs inside `full_params(model)`, a function written into the file (see the
rule summon-full-params), because FSDP1 gathered whole parameters for it. `model.rank` and `model.world_size` of a
model over all ranks become `dist.get_rank()` and `dist.get_world_size()`, `model.process_group` becomes
`dist.group.WORLD`, `model.compute_device` the device of a parameter. Others, such as `check_is_root()`,
`model.sharding_strategy` and `model._handle`, get a TODO.

Why: `fully_shard` leaves the attributes of a module alone; each of these would raise AttributeError, and `apply` would
show the function a shard where it expects a parameter.

Before::

    model.apply(init_weights)

After::

    with full_params(model):
        model.apply(init_weights)

In numbers: equal.

Known limits: an attribute of the same name in a class of the program is taken to be meant; of classes out of sight
only these names are known. The value of `apply` (the model) must not be used.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..full_params import helper
from ..grade import Grade
from ..origin import INSTANCE
from ..syntax import is_store
from ..wraps import Wrap

SOURCES = ("fsdp1",)
_KNOWN = ("rank", "world_size", "process_group", "compute_device")
_NO_COUNTERPART = {
    "check_is_root": "the root is the module whose forward runs first, so of a whole model it is True",
    "sharding_strategy": "keep the choice in a variable",
    "mixed_precision": "keep the policy in a variable",
    "cpu_offload": "keep the choice in a variable",
    "backward_prefetch": "it is always on",
    "forward_prefetch": "see set_modules_to_forward_prefetch",
    "limit_all_gathers": "it is always on",
    "training_state": "no state of FSDP2 is public",
    "flatten_parameters": "there are no flat parameters: use model.parameters()",
    "_handle": "there are no flat parameters: use model.parameters()",
    "_handles": "there are no flat parameters: use model.parameters()",
    "_flat_param": "there are no flat parameters: use model.parameters()",
    "_lazy_init": "nothing needs it",
    "_is_root": "the root is the module whose forward runs first",
}


def rewrite(draft: Draft) -> None:
    """Replace what has a counterpart, and report the rest."""
    module = draft.module
    for node in module.every(cst.Attribute):
        name = node.attr.value
        if (name not in _KNOWN and name not in _NO_COUNTERPART) or is_store(module, node) or module.skips(node):
            continue
        wraps = draft.wraps_of(node.value, "fsdp1")
        if not wraps or any(_is_users(draft, wrap, name) for wrap in wraps):
            continue
        if name in _NO_COUNTERPART:
            draft.todo(node, f"{name} of FSDP1 has no counterpart: {_NO_COUNTERPART[name]}")
            continue
        grouped = any(wrap.text(one) not in ("", "None") for wrap in wraps for one in ("process_group", "device_mesh"))
        if grouped and name != "compute_device":
            draft.todo(
                node, f"{name} of FSDP1 has no counterpart: ask the group or the mesh that the model is sharded over"
            )
            continue
        if name == "compute_device":
            draft.replace(node, "next(", *module.quote(node.value), ".parameters()).device")
        else:
            dist = draft.need_module("torch.distributed", "dist")
            draft.replace(node, f"{dist}.group.WORLD" if name == "process_group" else f"{dist}.get_{name}()")
        draft.note(node, Grade.EXACT, f"{name} was the wrapper's")
    for call, _ in draft.methods("apply", sources=("fsdp1",)):
        _apply(draft, call)


def _apply(draft: Draft, call: cst.Call) -> None:
    assert isinstance(call.func, cst.Attribute)
    module = draft.module
    statement = module.statement(call)
    if not isinstance(statement, cst.Expr) or statement.value is not call:
        draft.note(call, Grade.NUMERICS, "apply shows its function shards, where FSDP1 gathered whole parameters")
        return
    name, step = helper(draft), module.step()
    line = (f"with {name}(", *module.quote(call.func.value), "):")
    draft.statement_becomes(statement, [line, (step, module.span(statement))])
    draft.note(call, Grade.EXACT, "apply runs on whole parameters, as in FSDP1")


def _is_users(draft: Draft, wrap: Wrap, name: str) -> bool:
    """Whether the wrapped model's class, or a statement of the program, gives it an attribute of this name."""
    subject = wrap.subject
    for origin in draft.flow.origins(subject.module, subject.node) if subject is not None else ():
        if origin.kind == INSTANCE and isinstance(origin.node, cst.ClassDef):
            text = origin.module.code(origin.node)
            if f"self.{name}" in text or f"def {name}(" in text or draft.flow.member(origin.module, origin.node, name):
                return True
    return any(
        wrap in draft.peers[id(m)].wraps_of(t.value, "fsdp1")
        for m, t in draft.flow.stores(name)
        if id(m) in draft.peers
    )
