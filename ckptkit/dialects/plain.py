"""plain: the training loop that everybody writes: one dict with the model, the optimizer and some more.

What: a bare state dict, or a dict with the model's state dict under one of its usual names (model, state_dict,
model_state_dict, module, net, weights, ...), the optimizer's under one of its own (optimizer, optim,
optimizer_state_dict, ...), and the scheduler, step, epoch, RNG states beside them.

Written: `{"model": ..., "optimizer": ..., extras...}` in one container; a safetensors target gets the same roles.

Why names are enough: the roles are told by names, and then checked by what is there: a model is a flat dict of tensors,
an optimizer has `state` and `param_groups`. A dict of tensors under a name that is not known is never taken for
anything: it is carried as an extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.checkpoint import Contents, State
from ..core.flat_optimizer import is_flat, nested_optimizer
from ..core.tree import is_tensors

NAME = "plain"
_MODEL = (
    "model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights", "params",
    "model_weights", "model_dict",
)  # fmt: skip
_OPTIMIZER = (
    "optimizer", "optim", "optimizer_state_dict", "optimizer_state", "optim_state_dict", "optim_state", "opt",
    "optimizer_dict",
)  # fmt: skip
_RENAMED = {
    "scheduler": "scheduler", "lr_scheduler": "scheduler", "scheduler_state_dict": "scheduler", "sched": "scheduler",
    "lr_scheduler_state_dict": "scheduler", "scheduler_state": "scheduler", "lr_sched": "scheduler",
    "step": "step", "global_step": "step", "iteration": "step", "iter": "step", "num_steps": "step", "it": "step",
}  # fmt: skip
_ROLES = ("model", "optimizer", "master")  # names that are written
# Top-level names of frameworks with dialects of their own: their keys are not for this one.
_OTHERS = frozenset({"app", "pytorch-lightning_version"})
_DEEPSPEED = ("zero", "universal")  # containers whose keys only DeepSpeed writes


def claims(contents: Contents) -> str | None:
    tree = contents.tree
    if contents.format in _DEEPSPEED:
        return None
    if is_tensors(tree):
        return "a bare state dict"
    if not isinstance(tree, Mapping) or _OTHERS & set(map(str, tree)):
        return None
    model = _model_key(tree)
    if model is None:
        return None
    optimizer = _optimizer_key(tree)
    return f"keys {model!r} and {optimizer!r}" if optimizer else f"key {model!r}"


def _model_key(tree: Mapping[str, Any]) -> str | None:
    return next((name for name in _MODEL if is_tensors(tree.get(name))), None)


def _optimizer_key(tree: Mapping[str, Any]) -> str | None:
    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and ("state" in value or "param_groups" in value or is_flat(value))

    return next((name for name in _OPTIMIZER if fits(tree.get(name))), None)


def read(parts: Mapping[str, Contents]) -> State:
    contents = parts[""]
    tree = contents.tree
    if is_tensors(tree):
        return State(model=tree, warnings=contents.warnings, **contents.facts)
    model, optimizer = _model_key(tree), _optimizer_key(tree)
    assert model is not None, "claims() said so"
    masters = tree["master"] if is_tensors(tree.get("master")) else {}
    roles = {model, optimizer, *(["master"] if masters else [])}
    extras: dict[str, Any] = {}
    for name, value in tree.items():
        if name in _ROLES and name not in roles:
            # `{"state_dict": ..., "model": "resnet50"}`: a role's name for something else.
            extras[f"{name}_"] = value
        elif name not in roles:
            known = _RENAMED.get(name, name)
            # Two names of one role (`step` and `iteration`) keep their own names.
            extras[known if known not in extras and (known == name or known not in tree) else name] = value
    others = [
        name for name, value in extras.items() if isinstance(value, Mapping) and {"state", "param_groups"} <= set(value)
    ]
    carried = [f"the optimizer {name!r} goes along as it is: one optimizer is fitted to the target" for name in others]
    return State(
        model=tree[model],
        optimizer=nested_optimizer(tree[optimizer]) if optimizer else None,
        masters=masters,
        extras=extras,
        warnings=(*contents.warnings, *carried),
        **contents.facts,
    )


def write(state: State, format: str) -> Mapping[str, Contents]:
    tree: dict[str, Any] = {"model": dict(state.model)}
    if state.optimizer is not None:
        tree["optimizer"] = state.optimizer
    if state.masters:
        tree["master"] = dict(state.masters)
    tree |= state.extras
    facts = {"aliases": state.aliases, "buffers": state.buffers, "frozen": state.frozen}
    return {"": Contents(format, tree, "written by ckptkit", facts=facts)}
