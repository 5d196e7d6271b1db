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
            if name not in names and _runs_layers(draft, wrap, name) and wrap in peer.wraps_of(call.func.value):
                names[name] = None
    for name in names:
        register = draft.need("torch.distributed.fsdp", "register_fsdp_forward_method")
        wrap.plan.step(Order.INIT, f'{register}({MODEL}, "{name}")')
        draft.note(wrap.call, Grade.EXACT, f"the method {name} gathers parameters as forward does")


def rewrite(draft: Draft) -> None:
    """Call the model instead of its forward."""
    for call, _ in draft.methods("forward", sources=SOURCES):
        assert isinstance(call.func, cst.Attribute)
        draft.replace(call.func, *draft.module.quote(call.func.value))
        draft.note(call, Grade.EXACT, "calling the model runs the hooks that gather its parameters")


def _runs_layers(draft: Draft, wrap: Wrap, name: str) -> bool:
    """Whether a method of the wrapped class calls `self.layer(...)` and not the model itself."""
    subject = wrap.subject
    if subject is None:
        return False
    for origin in draft.flow.origins(subject.module, subject.node):
        if origin.kind != INSTANCE or not isinstance(origin.node, cst.ClassDef):
            continue
        methods = [m for m in origin.node.body.body if isinstance(m, cst.FunctionDef)]
        known = {m.name.value for m in methods}
        for method in methods:
            if method.name.value != name or name.startswith("__"):
                continue
            called = [origin.module.code(c.func) for c in origin.module.inside(method, cst.Call)]
            own = [c.removeprefix("self.").split(".")[0].split("[")[0] for c in called if c.startswith("self.")]
            return "self" not in called and any(c not in known and c not in _MODULE_METHODS for c in own)
    return False


_MODULE_METHODS = frozenset(
    "parameters named_parameters modules named_modules children named_children buffers named_buffers state_dict "
    "load_state_dict train eval to cuda cpu apply register_buffer register_parameter add_module".split()
)
