"""torchtitan: a DCP directory whose top-level keys are the model's, with a flat optimizer beside them.

What: `step-N/` with the model's names at the top, `optimizer` in the flat form (`state.<fqn>.<slot>`,
`param_groups.<fqn>.<name>`), `lr_scheduler` (`last_epoch`), `train_state` (`step`, `ntokens_seen`) and `dataloader`.

Written: the same keys. torchtitan computes rates from its own configuration and `last_epoch`; what else the scheduler
held stands beside it, unread. The number of tokens seen is 0 where the source does not know it.

Limits: torchtitan's data loader has a state of its own for each rank. A source from elsewhere has none, and torchtitan
must be told not to look for it (`exclude_from_loading`). A checkpoint of the model alone is a bare state dict, which
`--dialect plain` reads and writes.

Source: components/checkpointer/dcp.py and components/optimizer/utils.py of torchtitan 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.checkpoint import Contents, State
from ..core.flat_optimizer import flattened_optimizer, is_flat, nested_optimizer
from ..core.spec import Tensor
from ..core.tree import is_tensors
from ..errors import UsageError

NAME = "torchtitan"
_ROLES = ("optimizer", "lr_scheduler", "train_state", "dataloader")
_REST = "ckptkit_extras"  # what torchtitan has no place for, and does not look for
_STEP, _EPOCH, _TOKENS = "step", "last_epoch", "ntokens_seen"


def claims(contents: Contents) -> str | None:
    tree = contents.tree
    if not isinstance(tree, Mapping) or not any(isinstance(value, Tensor) for value in tree.values()):
        return None
    if any(is_tensors(value) for name, value in tree.items() if name not in ("optimizer", _REST)):
        return None  # a model under a key of its own
    roles = [name for name in _ROLES if isinstance(tree.get(name), Mapping)]
    if not roles or ("optimizer" in roles and not is_flat(tree["optimizer"])):
        return None
    return f"the model's names at the top, beside {', '.join(roles)}"


def read(parts: Mapping[str, Contents]) -> State:
    contents = parts[""]
    tree = contents.tree
    model = {key: value for key, value in tree.items() if isinstance(value, Tensor) or _is_extra_state(key)}
    extras = {key: value for key, value in tree.items() if key not in model and key not in ("optimizer", _REST)}
    extras |= tree.get(_REST, {})
    masters = extras.pop("master", {})
    if "lr_scheduler" in extras:
        extras["scheduler"] = extras.pop("lr_scheduler")
    train = extras.get("train_state")
    if isinstance(train, Mapping) and _STEP in train:
        extras[_STEP] = train[_STEP]
    optimizer = nested_optimizer(tree["optimizer"]) if "optimizer" in tree else None
    return State(model, optimizer, masters, extras, warnings=contents.warnings, **contents.facts)


def _is_extra_state(key: Any) -> bool:
    return isinstance(key, str) and key.endswith("_extra_state")


def write(state: State, format: str) -> Mapping[str, Contents]:
    if format != "dcp":
        raise UsageError(
            f"torchtitan does not load {format}", why="its checkpoints are DCP directories", hint="--to dcp"
        )
    extras = dict(state.extras)
    scheduler, step = extras.pop("scheduler", None), extras.pop(_STEP, None)
    train = extras.pop("train_state", None)
    tree: dict[str, Any] = dict(state.model)
    warnings = list(state.warnings)
    if state.optimizer is not None:
        tree["optimizer"] = flattened_optimizer(state.optimizer)
    if not isinstance(train, Mapping) and step is not None:
        train = {_STEP: step, _TOKENS: 0}
        warnings.append("the source does not say how many tokens were seen: torchtitan counts them from 0")
    if not isinstance(scheduler, Mapping) and step is not None:
        scheduler = {_EPOCH: step}
    tree |= {"lr_scheduler": scheduler} if scheduler is not None else {}
    tree |= {"train_state": train} if train is not None else {}
    if "dataloader" in extras:
        tree["dataloader"] = extras.pop("dataloader")
    else:
        warnings.append("there is no state of torchtitan's data loader: set exclude_from_loading to dataloader")
    # Beside the model's names a tensor would be taken for one of the model's.
    rest = {**extras, **({"master": dict(state.masters)} if state.masters else {})}
    tree |= {_REST: rest} if rest else {}
    facts = {"aliases": state.aliases, "buffers": state.buffers, "frozen": state.frozen}
    return {"": Contents(format, tree, f"written for {NAME}", warnings=tuple(warnings), facts=facts)}
