"""model.forward(...) becomes model(...), so that the hooks which gather the parameters run.

What: direct calls of `forward` on a sharded model. Other methods of the model's class that run its layers are
registered with `register_fsdp_forward_method`.

Why: FSDP1's wrapper gathered parameters in its own `forward`. FSDP2 does so in hooks, which only calling the module
runs; without them the first layer raises on a mix of torch.Tensor and DTensor.

Before::

    y = model.forward(x)

After::

    y = model(x)

In numbers: equal.

Known limits: methods are found in classes of the program only.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..models import runs_layers
from ..origin import INSTANCE
from ..plan import MODEL, Order
from ..wraps import Wrap

SOURCES = ("fsdp1", "ddp", "deepspeed")


def plan(draft: Draft, wrap: Wrap) -> None:
    """Register methods that are called on the sharded model and run its layers."""
    names: dict[str, None] = {}
    for peer in draft.peers.values():
        for call in peer.module.every(cst.Call):
            if not isinstance(call.func, cst.Attribute) or call.func.attr.value in ("forward", "__init__"):
                continue
            name = call.func.attr.value
            if name not in names and runs_layers(draft, wrap, name) and wrap in peer.wraps_of(call.func.value):
                names[name] = None
    for name in names:
        register = draft.need("torch.distributed.fsdp", "register_fsdp_forward_method")
        line = f'{register}({MODEL}, "{name}")'
        if not _all_have(draft, wrap, name):
            line = f'if hasattr({MODEL}, "{name}"):\n{draft.module.step()}{line}'
        wrap.plan.step(Order.INIT, line)
        draft.note(wrap.call, Grade.EXACT, f"the method {name} gathers parameters as forward does")


def rewrite(draft: Draft) -> None:
    """Call the model instead of its forward."""
    for call, _ in draft.methods("forward", sources=SOURCES):
        assert isinstance(call.func, cst.Attribute)
        draft.replace(call.func, *draft.module.quote(call.func.value))
        draft.note(call, Grade.EXACT, "calling the model runs the hooks that gather its parameters")


def _all_have(draft: Draft, wrap: Wrap, name: str) -> bool:
    """Whether every model that this call may wrap is of a class with the method: a function may wrap several."""
    assert wrap.subject is not None, "runs_layers() asked"
    return all(
        origin.kind == INSTANCE
        and isinstance(origin.node, cst.ClassDef)
        and any(isinstance(m, cst.FunctionDef) and m.name.value == name for m in origin.node.body.body)
        for origin in draft.flow.origins(wrap.subject.module, wrap.subject.node)
    )
