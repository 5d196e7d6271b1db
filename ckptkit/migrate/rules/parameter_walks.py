"""A loop that changes parameters by hand first puts the model back into shards, which an evaluation leaves gathered.

What: `for p in model.parameters():` (also `named_parameters()`, and in `zip`) whose body changes what it walks over
becomes a walk over `resharded(model)`, in programs that run a model without a backward (`no_grad`,
`inference_mode`, `generate`).

Why: after such a forward FSDP2's root holds plain, gathered parameters. Where another model's are in shards the two do
not mix (RuntimeError); where both are gathered the change is made to a copy that the next forward throws away.

Before::

    for averaged, p in zip(ema.parameters(), model.parameters()):
        averaged.mul_(0.9).add_(p, alpha=0.1)

After::

    for averaged, p in zip(resharded(ema).parameters(), resharded(model).parameters()):
        averaged.mul_(0.9).add_(p, alpha=0.1)

A loop over a sharded model and one that is not (a teacher, an average that was copied before) gets a TODO: the two do
not mix.

In numbers: equal to DDP. FSDP1 itself loses the change of what its root had gathered (measured, torch 2.13: an average
that is evaluated between its updates parts from DDP's by 2e-2 in five steps), and the migrated program does not.

Known limits: walks over lists of parameters that were taken before, and changes in functions that the loop calls, are
not seen.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..replicas import holding
from ..resharding import EVALUATES, wrapped

SOURCES = ("fsdp1", "ddp", "deepspeed")
_WALKS = ("parameters", "named_parameters")


def rewrite(draft: Draft) -> None:
    """Reshard the models whose parameters a loop changes."""
    for loop in draft.module.every(cst.For):
        if draft.module.skips(loop) or not _changes(draft, loop):
            continue
        walks = [
            (call, call.func.value)
            for call in draft.module.inside(loop.iter, cst.Call)
            if isinstance(call.func, cst.Attribute) and call.func.attr.value in _WALKS
        ]
        sharded = [(call, model) for call, model in walks if holding(draft, model, *SOURCES)]
        if sharded and len(sharded) < len(walks):
            draft.todo(loop, "one of these models is in shards and the other is not: shard both, or use .full_tensor()")
            continue
        if not sharded or not any(_evaluates(peer) for peer in draft.peers.values()):
            continue
        for call, model in sharded:
            inner = model
            if isinstance(inner, cst.Attribute) and inner.attr.value == "module":
                inner = inner.value
            draft.replace(model, *wrapped(draft, draft.module.quote(inner)))
            if any(wrap.source == "fsdp1" for wrap in holding(draft, model, *SOURCES)):
                draft.note(call, Grade.NUMERICS, "FSDP1 lost such changes after an evaluation, and now they are kept")
            else:
                draft.note(call, Grade.EXACT, "the parameters are changed in shards, also after an evaluation")


def _evaluates(draft: Draft) -> bool:
    """Whether a sharded model runs without a backward in a file, in `with torch.no_grad():` or so decorated."""
    module = draft.module
    for call in module.every(cst.Call):
        generates = isinstance(call.func, cst.Attribute) and call.func.attr.value == "generate"
        model = call.func.value if generates else call.func  # type: ignore[attr-defined]
        if not isinstance(model, (cst.Name, cst.Attribute)):
            continue
        if not holding(draft, model, *SOURCES):
            continue
        around = [
            draft.code(item.item) for one in module.ancestors(call) if isinstance(one, cst.With) for item in one.items
        ]
        function = module.function(call)
        if isinstance(function, cst.FunctionDef):
            around += [draft.code(one.decorator) for one in function.decorators]
        if generates or any(EVALUATES.search(text) for text in around):
            return True
    return False


def _changes(draft: Draft, loop: cst.For) -> bool:
    """Whether the body of a loop changes tensors in place: `p.mul_()`, `p.data = ...`, `p.data.copy_()`."""
    walked = {name.value for name in draft.module.inside(loop.target, cst.Name)}
    for call in draft.module.inside(loop.body, cst.Call):
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value.endswith("_") and not func.attr.value.endswith("__"):
            inner = {name.value for name in draft.module.inside(func.value, cst.Name)}
            if ".grad" in draft.code(func.value):
                continue  # gradients are in shards after every backward
            if inner & walked and func.attr.value not in ("requires_grad_", "zero_"):
                return True
    for assign in draft.module.inside(loop.body, cst.Assign):
        for target in assign.targets:
            at = target.target
            if isinstance(at, cst.Attribute) and at.attr.value == "data" and draft.code(at.value) in walked:
                return True
    return False
