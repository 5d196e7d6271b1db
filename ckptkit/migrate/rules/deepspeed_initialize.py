"""deepspeed.initialize becomes plain code: a sharded model, an optimizer with all its hyper-parameters, a scheduler.

What: the call and its four values. The optimizer of the config is written with explicit hyper-parameters, an optimizer
that the program makes moves behind the sharding (rule optimizer-order), `training_data` becomes a DataLoader with a
DistributedSampler, schedulers of the config become classes of torch.optim.lr_scheduler.

Why: DeepSpeed's defaults are not torch's: Adam is AdamW (adam_w_mode) with weight_decay 0, where torch's AdamW decays
by 0.01. Its WarmupLR and WarmupDecayLR run the first two updates both at the lowest rate.

Before::

    engine, optimizer, _, scheduler = deepspeed.initialize(model=net, config={
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})

After::

    fully_shard(net)
    engine = net
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

In numbers: equal to the last bit in fp32 with torch's optimizers; DeepSpeed's own Adam kernels round otherwise in the
last bits (1e-7 relative).

Known limits: where the engine is used in other functions, optimizer, scheduler and counters become attributes of the
model (`engine.optimizer`), because only the model is at hand there.
"""

from __future__ import annotations

from typing import Any

import libcst as cst

from ..draft import Draft
from ..ds_config import Unknown, entry
from ..ds_setup import Setup, setup_of, spelled
from ..edit import Piece
from ..grade import Grade
from ..loss_scale import scaler_lines
from ..origin import CALL
from ..plan import Line, Order
from ..schedules import scheduler_lines
from ..shard import sharded
from ..wraps import Value, Wrap

SOURCES = ("deepspeed",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Refuse shapes that cannot become statements."""
    setup = setup_of(draft, wrap)
    if isinstance(setup, Unknown):
        return
    statement = draft.module.statement(wrap.call)
    place = _place(statement, wrap.call)
    if place == "":
        wrap.plan.refuse("deepspeed-initialize", "give deepspeed.initialize a statement of its own")
        return
    client = setup.client_optimizer
    if client is not None and not _is_made_here(draft, wrap, client):
        wrap.plan.refuse("deepspeed-initialize", "the optimizer is made elsewhere: make it after the model is sharded")
    if client is not None and place == "return" and isinstance(client.node, cst.Name):
        wrap.plan.refuse("deepspeed-initialize", "assign the values of deepspeed.initialize before they are returned")
    if _parameters(draft, wrap, setup) is None:
        wrap.plan.refuse(
            "deepspeed-initialize", "the parameters are gathered elsewhere: gather them after the model is sharded"
        )


def _place(statement: cst.CSTNode, call: cst.Call) -> str:
    """Where a call's values go: `tuple`, `first` (`[0]`), `whole`, `return`, `nothing`; empty where it is nested."""
    value = getattr(statement, "value", None)
    if isinstance(value, cst.Subscript) and value.value is call:
        index = value.slice[0].slice
        zero = isinstance(index, cst.Index) and isinstance(index.value, cst.Integer) and index.value.value == "0"
        return "first" if zero and isinstance(statement, cst.Assign) else ""
    if value is not call:
        return ""
    if isinstance(statement, cst.Return):
        return "return"
    if isinstance(statement, cst.Expr):
        return "nothing"
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return ""
    return "tuple" if isinstance(statement.targets[0].target, (cst.Tuple, cst.List)) else "whole"


def _is_made_here(draft: Draft, wrap: Wrap, value: Value) -> bool:
    """Whether an optimizer is made in the call itself, or by a line above it in its own block."""
    if not isinstance(value.node, (cst.Name, cst.Attribute)):
        return True
    if any(o.kind != CALL for o in draft.flow.origins(value.module, value.node)):
        return True  # a class, function or lambda that makes it
    code, line = value.module.code(value.node), draft.module.line(wrap.call)
    for sibling in draft.module.siblings(wrap.call):
        if sibling is line:
            return False
        for assign in draft.module.inside(sibling, cst.Assign):
            if any(code in draft.code(target.target).replace("(", "").split(", ") for target in assign.targets):
                return True
    return False


def rewrite(draft: Draft) -> None:
    """Write the statements of every wrap that stays with the plan."""
    for wrap in draft.wraps:
        setup = wrap.facts.get("deepspeed")
        if wrap.source == "deepspeed" and not wrap.plan.refused and isinstance(setup, Setup):
            _write(draft, wrap, setup)


def _write(draft: Draft, wrap: Wrap, setup: Setup) -> None:
    module = draft.module
    statement = module.statement(wrap.call)
    place = _place(statement, wrap.call)
    subject = wrap.subject
    assert subject is not None
    text = module.code(subject.node)
    is_name = isinstance(subject.node, (cst.Name, cst.Attribute))
    lines: list[Line] = [] if is_name else [(f"{setup.model} = ", *module.quote(subject.node))]
    lines += sharded(draft, wrap, text if is_name else setup.model)
    if is_name and text != setup.model:
        lines.append((f"{setup.model} = {text}",))
    tail = _tail(draft, wrap, setup)
    if place == "return":
        values = (setup.model, setup.optimizer if _has_optimizer(setup) else "None", "None", setup.scheduler or "None")
        lines += [*tail, (f"return {', '.join(values)}",)]
    elif place == "whole" and isinstance(statement, cst.Assign):
        target = module.code(statement.targets[0].target)
        values = (setup.model, setup.optimizer if _has_optimizer(setup) else "None", "None", setup.scheduler or "None")
        tail.append((f"{target} = ({', '.join(values)})",))
    wrap.plan.written = True
    comments = [(comment,) for comment in module.comments_in(statement)]
    draft.statement_becomes(statement, [*comments, *lines])
    if place != "return" and tail:
        draft.after(statement, *tail, order=Order.SCHEDULER + 10)
    draft.note(wrap.call, Grade.EXACT, "deepspeed.initialize becomes plain code")


def _has_optimizer(setup: Setup) -> bool:
    return setup.client_optimizer is not None or entry(setup.tree, "optimizer.type") is not None


def _tail(draft: Draft, wrap: Wrap, setup: Setup) -> list[Line]:
    """What comes behind the sharding: optimizer, scheduler, scaler, loader, counters, attributes of the model."""
    model, optimizer = setup.model, setup.optimizer
    lines: list[Line] = []
    kind = entry(setup.tree, "optimizer.type")
    parameters = _parameters(draft, wrap, setup)
    assert parameters is not None
    client = setup.client_optimizer
    if client is not None:
        code = client.module.code(client.node)
        if not isinstance(client.node, (cst.Name, cst.Attribute)) and not isinstance(client.node, cst.Lambda):
            lines.append((f"{optimizer} = ", *draft.module.quote(client.node)))
        elif any(o.kind != CALL for o in draft.flow.origins(client.module, client.node)):
            maker = f"({code})" if isinstance(client.node, cst.Lambda) else code
            lines.append((f"{optimizer} = {maker}(", *parameters, ")"))
        elif code != optimizer:
            lines.append((f"{optimizer} = {code}",))
    elif kind is not None:
        lines.append((f"{optimizer} = ", *_optimizer(draft, wrap, setup, str(kind), parameters)))
    elif _is_named(draft, wrap, 1):
        lines.append((f"{optimizer} = None",))
    lines += _scheduler(draft, wrap, setup)
    lines += scaler_lines(draft, setup)
    lines += _loader(draft, wrap, setup)
    for name, line in setup.stored.items():
        lines.append((f"{setup.at(model, name)} = ", *line))
    counters = [*(["micro_steps"] if setup.accumulates else []), *sorted(setup.counts)]
    for name in counters:
        lines.append((f"{setup.at(model, name)} = {'None' if name == 'grad_norm' else '0'}",))
    if not setup.local:
        if _has_optimizer(setup):
            lines.append((f"{model}.optimizer = {optimizer}",))
        if setup.scheduler:
            lines.append((f"{model}.lr_scheduler = {setup.scheduler}",))
        message = "the engine is used in other functions: optimizer, scheduler and counters are attributes of the model"
        draft.note(wrap.call, Grade.EXACT, message)
    return lines


def _parameters(draft: Draft, wrap: Wrap, setup: Setup) -> Line | None:
    """What the optimizer takes, said anew behind the sharding; None where its making cannot be repeated."""
    value = wrap.args.get("model_parameters")
    if value is None or wrap.text("model_parameters") == "None":
        return (f"{setup.model}.parameters()",)
    if not isinstance(value.node, cst.Name):
        return draft.module.quote(value.node) if value.module is draft.module else None
    if setup.client_optimizer is not None:
        return draft.module.quote(value.node)  # the optimizer has them already
    line = draft.module.line(wrap.call)
    for sibling in draft.module.siblings(wrap.call):
        if sibling is line:
            break
        for assign in draft.module.inside(sibling, cst.Assign):
            if any(draft.code(target.target) == value.node.value for target in assign.targets):
                return (value.node.value,)  # the rule optimizer-order moves its making behind the sharding
    return None


def _optimizer(draft: Draft, wrap: Wrap, setup: Setup, kind: str, parameters: Line) -> Line:
    torch = draft.need_module("torch")
    given: dict[str, Any] = dict(entry(setup.tree, "optimizer.params", {}))
    name, lowered = kind, kind.lower()
    if lowered in ("adam", "adamw"):
        decoupled = lowered == "adamw" or given.get("adam_w_mode", True)
        name = "AdamW" if decoupled else "Adam"
        of_torch = given.get("torch_adam", False)
        decay = 0.01 if of_torch and decoupled else 0.0
        rest = {k: v for k, v in given.items() if k in ("amsgrad", "fused", "foreach")}
        given = {
            "lr": given.get("lr", 1e-3),
            "betas": given.get("betas", (0.9, 0.999)),
            "eps": given.get("eps", 1e-8),
            "weight_decay": given.get("weight_decay", decay),
            **rest,
        }
        message = f"DeepSpeed's {kind} is {name} with weight_decay {decay} unless the config says otherwise"
        draft.note(wrap.call, Grade.EXACT, message)
    elif lowered == "adagrad":
        name = "Adagrad"
    pieces: list[Piece] = [f"{torch}.optim.{name}(", *parameters]
    for key, leaf in given.items():
        line = spelled(draft, wrap, leaf)
        if line is None:
            draft.todo(wrap.call, f"{key} of the optimizer comes from where it cannot be named here")
            continue
        pieces += [f", {key}=", *line]
    return (*pieces, ")")


def _scheduler(draft: Draft, wrap: Wrap, setup: Setup) -> list[Line]:
    client = setup.client_scheduler
    if client is None:
        if setup.scheduler:
            return scheduler_lines(draft, wrap, setup)
        return [(f"{_target(draft, wrap, 3)} = None",)] if _is_named(draft, wrap, 3) else []
    code = client.module.code(client.node)
    if isinstance(client.node, cst.Lambda):
        return [(f"{setup.scheduler} = ({code})({setup.optimizer})",)]
    if not isinstance(client.node, (cst.Name, cst.Attribute)):
        return [(f"{setup.scheduler} = ", *draft.module.quote(client.node))]
    functions = [o for o in draft.flow.origins(client.module, client.node) if o.kind == "function"]
    if functions:
        return [(f"{setup.scheduler} = {code}({setup.optimizer})",)]
    return [(f"{setup.scheduler} = {code}",)] if code != setup.scheduler else []


def _loader(draft: Draft, wrap: Wrap, setup: Setup) -> list[Line]:
    """deepspeed 0.19.8 DeepSpeedDataLoader: a DistributedSampler, micro-batches, drop_last only if the config says."""
    data = wrap.args.get("training_data")
    target = _target(draft, wrap, 2)
    if data is None or wrap.text("training_data") == "None":
        return [(f"{target} = None",)] if _is_named(draft, wrap, 2) else []
    if setup.micro is None or not target:
        return []
    loader = draft.need("torch.utils.data", "DataLoader")
    sampler = draft.need("torch.utils.data.distributed", "DistributedSampler")
    quoted = draft.module.quote(data.node)
    first: list[Line] = []
    if not isinstance(data.node, (cst.Name, cst.Attribute)):
        dataset = draft.fresh("dataset", "training_data")
        first, quoted = [(f"{dataset} = ", *quoted)], (dataset,)
    pieces: list[Piece] = [f"{target} = {loader}(", *quoted, ", batch_size=", *setup.micro]
    pieces += [f", sampler={sampler}(", *quoted, ")"]
    collate = wrap.args.get("collate_fn")
    if collate is not None:
        pieces += [", collate_fn=", *draft.module.quote(collate.node)]
    if entry(setup.tree, "dataloader_drop_last", False) is True:
        pieces.append(", drop_last=True")
    return [*first, (*pieces, ")")]


def _target(draft: Draft, wrap: Wrap, index: int) -> str:
    statement = draft.module.statement(wrap.call)
    if not isinstance(statement, cst.Assign):
        return ""
    target = statement.targets[0].target
    if not isinstance(target, (cst.Tuple, cst.List)) or len(target.elements) <= index:
        return ""
    element = target.elements[index]
    return draft.code(element.value) if isinstance(element, cst.Element) else ""


def _is_named(draft: Draft, wrap: Wrap, index: int) -> bool:
    return bool(set(_target(draft, wrap, index)) - {"_"})
