"""Fact: the classes of which a wrapped model is built in repetition, such as the blocks of a transformer."""

from __future__ import annotations

import libcst as cst
from libcst.helpers import get_full_name_for_node

from .draft import Draft
from .module import Module
from .origin import CLASS, INSTANCE
from .wraps import Wrap

_CONTAINERS = ("torch.nn.ModuleList", "torch.nn.modules.container.ModuleList")
_DEPTH = 4


def repeated_blocks(draft: Draft, wrap: Wrap) -> list[str]:
    """The block classes as they are named in the wrap's module; those that have no name there are left out."""
    subject = wrap.subject
    if subject is None:
        return []
    found: dict[int, tuple[Module, cst.ClassDef]] = {}
    for origin in draft.flow.origins(subject.module, subject.node):
        if origin.kind == INSTANCE and isinstance(origin.node, cst.ClassDef):
            _search(draft, origin.module, origin.node, found, _DEPTH, set())
    names = (_name_in(draft, wrap, where, block) for where, block in found.values())
    return [name for name in names if name]


def _search(
    draft: Draft,
    module: Module,
    owner: cst.ClassDef,
    found: dict[int, tuple[Module, cst.ClassDef]],
    depth: int,
    seen: set[int],
) -> None:
    if id(owner) in seen or depth == 0:
        return
    seen.add(id(owner))
    for call in module.inside(owner, cst.Call):
        name = draft.flow.called(module, call)
        if name in _CONTAINERS and call.args:
            attribute = _attribute(module, call)
            for where, block in _items(draft, module, call):
                if attribute and _calls_items(module, owner, attribute):
                    found.setdefault(id(block), (where, block))
        elif not name:
            for origin in draft.flow.origins(module, call.func):
                if origin.kind == CLASS and isinstance(origin.node, cst.ClassDef):
                    _search(draft, origin.module, origin.node, found, depth - 1, seen)
    for base in owner.bases:
        for origin in draft.flow.origins(module, base.value):
            if isinstance(origin.node, cst.ClassDef):
                _search(draft, origin.module, origin.node, found, depth - 1, seen)


def _attribute(module: Module, call: cst.Call) -> str:
    """`blocks` of `self.blocks = nn.ModuleList(...)`, or the key of `nn.ModuleDict(dict(h=nn.ModuleList(...)))`."""
    for holder in module.ancestors(call):
        if isinstance(holder, cst.Arg) and holder.keyword is not None:
            return holder.keyword.value
        if isinstance(holder, (cst.Assign, cst.AnnAssign)):
            target = holder.targets[0].target if isinstance(holder, cst.Assign) else holder.target
            return target.attr.value if isinstance(target, cst.Attribute) else ""
    return ""


def _items(draft: Draft, module: Module, call: cst.Call) -> list[tuple[Module, cst.ClassDef]]:
    """The classes of the program whose instances a container is built of, by comprehension or list."""
    argument = call.args[0].value
    if isinstance(argument, (cst.ListComp, cst.GeneratorExp)):
        elements = [argument.elt]
    elif isinstance(argument, (cst.List, cst.Tuple)):
        elements = [element.value for element in argument.elements]
    else:
        return []
    found = []
    for element in elements:
        for origin in draft.flow.origins(module, element):
            if origin.kind == INSTANCE and isinstance(origin.node, cst.ClassDef):
                found.append((origin.module, origin.node))
    return found


def _calls_items(module: Module, owner: cst.ClassDef, attribute: str) -> bool:
    """Whether a class calls, or hands to a function, the items of a container that it iterates over."""
    for loop in module.inside(owner, cst.For):
        if f".{attribute}" not in module.code(loop.iter):
            continue
        names = {n.value for n in module.inside(loop.target, cst.Name)}
        for call in module.inside(loop.body, cst.Call):
            if isinstance(call.func, cst.Name) and call.func.value in names:
                return True
            if any(isinstance(a.value, cst.Name) and a.value.value in names for a in call.args):
                return True
    for call in module.inside(owner, cst.Call):  # self.blocks[i](x)
        if isinstance(call.func, cst.Subscript) and module.code(call.func.value).endswith(f".{attribute}"):
            return True
    return False


def _name_in(draft: Draft, wrap: Wrap, where: Module, block: cst.ClassDef) -> str:
    """The name of a class in the wrap's module: its own, or imported from where the model comes from."""
    name, module = block.name.value, wrap.module
    top = where.parent(block) is where.tree
    if where is module:
        return name if top else ""
    for statement in module.every(cst.ImportFrom):
        if isinstance(statement.names, cst.ImportStar) or module.function(statement) is not None:
            continue
        base = get_full_name_for_node(statement.module) if statement.module else ""
        if draft.flow.program.find(base or "", module, len(statement.relative)) is not where:
            continue
        for alias in statement.names:
            if get_full_name_for_node(alias.name) == name:
                return (get_full_name_for_node(alias.asname.name) if alias.asname else name) or ""
        if top and not statement.relative and base:
            return draft.need(base, name)
    return ""
