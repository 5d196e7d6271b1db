"""Parameters without a dimension are left to a person: fully_shard takes none.

What: `nn.Parameter(torch.tensor(1.0))`, `torch.ones(())`, `torch.zeros([])` and sums and products of them get a TODO in
the classes of the program.

Why: fully_shard raises ValueError for a scalar parameter, as FSDP1 did; DDP and DeepSpeed take it.

Before::

    self.scale = nn.Parameter(torch.tensor(1.0))

To do::

    self.scale = nn.Parameter(torch.ones(1))

Old checkpoints hold a scalar there: load it with `state["scale"].reshape(1)`.

In numbers: equal; weight decay that skips parameters of fewer than two dimensions skips both.

Known limits: scalars that a function or a library makes are not seen.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft

SOURCES = ("ddp", "deepspeed")
_FILLED = ("torch.ones", "torch.zeros", "torch.empty", "torch.rand", "torch.randn")


def rewrite(draft: Draft) -> None:
    """Report them where they are made."""
    if not any(wrap.source in SOURCES and not wrap.plan.refused for wrap in draft.all_wraps):
        return
    for call in draft.calls("torch.nn.Parameter", "torch.nn.parameter.Parameter"):
        if call.args and _is_scalar(draft, call.args[0].value):
            draft.todo(call, "fully_shard takes no scalar parameter: give it one dimension, as torch.ones(1)")


def _is_scalar(draft: Draft, node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.BinaryOperation):
        number = (cst.Integer, cst.Float)
        sides = [one for one in (node.left, node.right) if not isinstance(one, number)]
        return any(_is_scalar(draft, one) for one in sides)
    if not isinstance(node, cst.Call) or not node.args:
        return False
    name, first = draft.flow.called(draft.module, node), node.args[0].value
    if name == "torch.tensor":
        inner = first.expression if isinstance(first, cst.UnaryOperation) else first
        return isinstance(inner, (cst.Integer, cst.Float))
    if name in _FILLED:
        return len(node.args) >= 1 and isinstance(first, (cst.Tuple, cst.List)) and not first.elements
    return False
