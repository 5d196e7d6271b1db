"""Numbers that a program takes from parameters or gradients by hand are left to a person, as each rank holds a part.

What: in a walk over `model.parameters()` or `named_parameters()`, a parameter, its `grad` or its `data` that is reduced
or copied out (`p.grad.norm()`, `.sum()`, `.item()`, `.cpu()`, `.numpy()`, `.view(-1)`, `float(p)`), and
`parameters_to_vector(model.parameters())`, get a TODO.

Why: the parameters of a sharded model and their gradients are DTensors, and `item()` of a sum over one is the sum over
this rank's part: the ranks print, compare and decide by other numbers than before, and nothing raises.

Before::

    total = sum(p.grad.norm() ** 2 for p in model.parameters())

To do::

    total = sum(p.grad.full_tensor().norm() ** 2 for p in model.parameters())

which all ranks must run; the norm alone is `torch.nn.utils.get_total_norm(...)` with `full_tensor()`.

In numbers: nothing changes by itself.

Known limits: parameters that are reached by attributes (`model.head.weight.norm()`), and lists of them, are not seen.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..replicas import holding

SOURCES = ("fsdp1", "ddp", "deepspeed")
_WALKS = ("parameters", "named_parameters")
_READS = frozenset("norm sum mean std var item tolist numpy cpu view reshape flatten ravel".split())
_TODO = (
    "each rank holds a part of this tensor: take the number from .full_tensor(), which all ranks must call; "
    "see ckptkit explain parameter-reads"
)


def rewrite(draft: Draft) -> None:
    """Report what is read by hand."""
    module = draft.module
    for call in module.every(cst.Call):
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in _WALKS or module.skips(call):
            continue
        if not holding(draft, func.value, *SOURCES):
            continue
        vector = module.up(call, cst.Call)
        if isinstance(vector, cst.Call) and draft.flow.called(module, vector).endswith(".parameters_to_vector"):
            draft.todo(call, _TODO)
            continue
        for around in module.ancestors(call):
            if isinstance(around, (cst.For, cst.CompFor)) and module.within(call, around.iter):
                target = around.target
                place: cst.CSTNode | None = around.body if isinstance(around, cst.For) else module.parent(around)
                if place is not None:
                    _reads(draft, {name.value for name in module.inside(target, cst.Name)}, place)
                break
            if isinstance(around, cst.BaseStatement):
                break


def _reads(draft: Draft, walked: set[str], place: cst.CSTNode) -> None:
    """Leave a TODO at the first thing that is read of what a walk yields."""
    module = draft.module
    for call in module.inside(place, cst.Call):
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value in _READS:
            base = func.value
        elif isinstance(func, cst.Name) and func.value == "float" and len(call.args) == 1:
            base = call.args[0].value
        else:
            continue
        chain = draft.code(base)
        if _root(base) in walked and ".full_tensor(" not in chain and ".shape" not in chain and "numel" not in chain:
            if not any(
                "summon" in draft.code(item.item) or "Gathered" in draft.code(item.item) for item in _with(draft, call)
            ):
                draft.todo(call, _TODO)
            return


def _with(draft: Draft, node: cst.CSTNode) -> list[cst.WithItem]:
    return [item for one in draft.module.ancestors(node) if isinstance(one, cst.With) for item in one.items]


def _root(node: cst.BaseExpression) -> str:
    """The name at the left end of `p.grad.detach().abs()`."""
    while True:
        if isinstance(node, cst.Attribute):
            node = node.value
        elif isinstance(node, cst.Call):
            node = node.func
        elif isinstance(node, cst.Subscript):
            node = node.value
        else:
            return node.value if isinstance(node, cst.Name) else ""
