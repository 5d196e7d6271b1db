"""A model that answers an object of a plain class is shown to FSDP2 with the object's attributes in a dict beside it.

What: where `forward` of the wrapped model returns an instance of a class of the program that is neither a dataclass nor
a tuple, list or dict, or a SimpleNamespace, two forward hooks stand around the sharding: the first puts the object's
`vars` beside it, the second takes them away again.

Why: FSDP2 starts its work in backward from hooks on the tensors that `forward` answers. It looks for them in tuples,
lists, dicts and dataclasses (transformers' ModelOutput is one), and in nothing else. DDP and DeepSpeed need no such
hooks. Of a model that is one group the gradients are then never reduced and never reach the optimizer, and no error is
raised (measured: the loss stays where it was, until the end).

Before::

    model = DDP(Net())  # Net.forward answers an Output(loss, logits)

After::

    model = Net()
    # FSDP2 looks for tensors in dicts and dataclasses, and in no Output: it is shown the attributes beside it.
    model.register_forward_hook(lambda module, inputs, output: (output, vars(output)))
    fully_shard(model)
    model.register_forward_hook(lambda module, inputs, output: output[0])

In numbers: equal. Once the class is a dataclass the hooks can go.

Known limits: classes out of sight, what is answered through functions that cannot be followed, and methods other than
forward are not seen. A class with __slots__, and one that a module with a group of its own answers (there FSDP1 raised
as well), get a TODO. Read in torch 2.13 torch/distributed/fsdp/_common_utils.py (collect_grad_tensors).
"""

from __future__ import annotations

import re

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..module import Module
from ..origin import CALL, FUNCTION, INSTANCE
from ..plan import MODEL, Order
from ..wraps import Wrap

SOURCES = ("fsdp1", "ddp", "deepspeed")
_SEEN_BASES = re.compile(r"Tuple|tuple|[Dd]ict|list|List|ModelOutput|BaseOutput|Tensor|TypedDict")
_OPAQUE = ("types.SimpleNamespace", "argparse.Namespace")


def plan(draft: Draft, wrap: Wrap) -> None:
    """Put the hooks around the sharding."""
    subject = wrap.subject
    for origin in draft.flow.origins(subject.module, subject.node) if subject is not None else ():
        if origin.kind != INSTANCE or not isinstance(origin.node, cst.ClassDef):
            continue
        name, hidden = _plain_output(draft, origin.module, origin.node)
        if not name:
            continue
        if hidden:
            draft.todo(wrap.call, _todo(origin.node, name))
            return
        article = "an" if name[0] in "AEIOU" else "a"
        wrap.plan.step(
            Order.PREPARE,
            f"# FSDP2 looks for tensors in dicts and dataclasses, not in {article} {name}: it is shown its attributes.",
            f"{MODEL}.register_forward_hook(lambda module, inputs, output: (output, vars(output)))",
        )
        wrap.plan.step(Order.INIT, f"{MODEL}.register_forward_hook(lambda module, inputs, output: output[0])")
        draft.note(
            wrap.call, Grade.EXACT, f"the tensors of {article} {name} are shown to FSDP2, which would not see them"
        )
        return


def rewrite(draft: Draft) -> None:
    """Leave a TODO where a module that gets a group of its own answers what FSDP2 does not look into."""
    for wrap in draft.wraps:
        loop = " ".join(draft.text(piece) for unit in wrap.plan.units for piece in unit.condition)
        named = set(re.findall(r"\w+", loop))
        for module in draft.flow.program if not wrap.plan.refused and named else ():
            for owner in module.every(cst.ClassDef):
                if owner.name.value in named and (name := _plain_output(draft, module, owner)[0]):
                    draft.todo(wrap.call, _todo(owner, name))


def _todo(owner: cst.ClassDef, name: str) -> str:
    return (
        f"{owner.name.value}.forward answers {name}, in which FSDP2 finds no tensors (gradients would not be reduced): "
        f"make {name} a dataclass, or answer a tensor, tuple or dict"
    )


def _plain_output(draft: Draft, module: Module, owner: cst.ClassDef) -> tuple[str, bool]:
    """The name of a class of which `forward` answers an instance, where FSDP2 sees no tensors in it; and whether they
    are in slots. An empty name where there is none.
    """
    for forward in draft.flow.member(module, owner, "forward"):
        if forward.kind != FUNCTION or not isinstance(forward.node, cst.FunctionDef):
            continue
        for origin in draft.flow.returned(forward.module, forward.node):
            if origin.kind == CALL and origin.name in _OPAQUE:
                return origin.name.rpartition(".")[2], False
            made = origin.node if origin.kind == INSTANCE else None
            if isinstance(made, cst.ClassDef) and _is_plain(draft, origin.module, made):
                return made.name.value, "__slots__" in origin.module.code(made)
    return "", False


def _is_plain(draft: Draft, module: Module, owner: cst.ClassDef) -> bool:
    if any("dataclass" in module.code(one.decorator) for one in owner.decorators):
        return False
    for base in owner.bases:
        if _SEEN_BASES.search(module.code(base.value)):
            return False
        inside = [o for o in draft.flow.origins(module, base.value) if isinstance(o.node, cst.ClassDef)]
        if any(not _is_plain(draft, o.module, o.node) for o in inside):  # type: ignore[arg-type]
            return False
        if not inside and module.code(base.value).rpartition(".")[2] not in ("object", "ABC", "BaseModel"):
            return False  # a class out of sight may be anything
    return True
