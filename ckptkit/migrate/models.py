"""Facts about the wrapped model and its device that several rules ask for."""

from __future__ import annotations

import re

import libcst as cst

from .draft import Draft
from .origin import CALL, INSTANCE, Origin
from .plan import Line
from .rule import spell
from .wraps import Value, Wrap

_LIBRARIES = re.compile(r"^\s*(?:from|import)\s+(?:transformers|torchvision|timm|diffusers|peft|open_clip)\b", re.M)
_BUFFERS = re.compile(r"register_buffer|Buffer\(|BatchNorm|InstanceNorm")
_SET_DEVICE = re.compile(r"\b(?:cuda|xpu|npu|accelerator)\.set_device(?:_index)?\(")


def device_kind(draft: Draft, value: Value | None) -> str:
    """`cpu`, `cuda` or, where only the run tells, `either`; an absent device or a number means `cuda`."""
    if value is None:
        return "cuda"
    kinds = {_kind(draft, origin) for origin in draft.flow.origins(value.module, value.node)}
    if not kinds or kinds == {"cuda"}:
        return "cuda"
    return "cpu" if kinds == {"cpu"} else "either"


def _kind(draft: Draft, origin: Origin) -> str:
    if origin.kind != CALL or origin.name != "torch.device" or not isinstance(origin.node, cst.Call):
        text = origin.node.evaluated_value if isinstance(origin.node, cst.SimpleString) else ""
        return "cpu" if str(text).startswith("cpu") else "cuda"
    node = origin.node.args[0].value if origin.node.args else None
    if isinstance(node, cst.SimpleString):
        return str(node.evaluated_value).split(":")[0]
    if isinstance(node, cst.FormattedString) and node.parts and isinstance(node.parts[0], cst.FormattedStringText):
        return node.parts[0].value.split(":")[0]
    if isinstance(node, cst.Integer):
        return "cuda"
    found = {_kind(draft, o) for o in draft.flow.origins(origin.module, node)} if node is not None else set()
    return found.pop() if len(found) == 1 else "either"


def device_type(draft: Draft, wrap: Wrap) -> Line:
    """The first argument of `init_device_mesh` for a wrap: a quoted word, or `device.type`."""
    value = wrap.args.get("device_id")
    kind = device_kind(draft, value)
    if kind == "either" and value is not None:
        spelled = spell(draft, wrap, value)
        if spelled is not None:
            return (*spelled, ".type")
    return ('"cpu"',) if kind == "cpu" else ('"cuda"',)


def sets_device(draft: Draft) -> bool:
    """Whether any file of the program chooses its GPU itself."""
    return any(_SET_DEVICE.search(module.text.masked) for module in draft.flow.program)


def may_have_buffers(draft: Draft, wrap: Wrap) -> bool:
    """Whether the model may hold floating-point buffers: it is built of classes that we cannot see, or that register
    some.
    """
    subject = wrap.subject
    origins = draft.flow.origins(subject.module, subject.node) if subject is not None else frozenset()
    seen = bool(origins) and all(
        (o.kind == INSTANCE) or (o.kind == CALL and o.name.startswith("torch.nn.")) for o in origins
    )
    return not seen or _mentions(draft, _BUFFERS) or _mentions(draft, _LIBRARIES)


def may_have_batch_norm(draft: Draft, wrap: Wrap) -> bool:
    """Whether the model may hold BatchNorm layers: the program names them, or takes models from a vision library."""
    return _mentions(draft, re.compile(r"BatchNorm|torchvision|timm|resnet|hub\.load"))


def _mentions(draft: Draft, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(module.text.masked) for module in draft.flow.program)


def compiles(draft: Draft) -> bool:
    """Whether the program wraps models by `torch.compile`, which puts `_orig_mod.` before the names of parameters."""
    return any(
        draft.flow.called(module, call) == "torch.compile"
        for module in draft.flow.program
        for call in module.every(cst.Call)
    )


def literal(draft: Draft, value: Value | None) -> bool | None:
    """The truth of an argument that is a constant here; None where only the run tells."""
    if value is None:
        return False
    origins = draft.flow.origins(value.module, value.node)
    if len(origins) == 1 and draft.flow.is_fixed(value.module, value.node):
        node = next(iter(origins)).node
        if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
            return node.value == "True"
    return None


_MODULE_METHODS = frozenset(
    "parameters named_parameters modules named_modules children named_children buffers named_buffers state_dict "
    "load_state_dict train eval to cuda cpu apply register_buffer register_parameter add_module".split()
)


def runs_layers(draft: Draft, wrap: Wrap, name: str) -> bool:
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
