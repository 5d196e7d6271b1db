"""Tied weights stay in one group: a module that would get a group of its own, apart from its partner, gets none.

What: where the program ties parameters (`self.head.weight = self.embed.weight`) and the wrap policy picks one of the
two modules, the loop leaves out the modules that share a parameter with one outside of them. They belong to the group
of the model (or of the module that holds both).

Why: `fully_shard` refuses a parameter that is in two groups. FSDP1 with use_orig_params=True failed in such a program;
with use_orig_params=False it ran, and trained the two as separate parameters from the first step on.

Before::

    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}))

After::

    apart = tied_apart(net)
    for module in reversed(list(net.modules())[1:]):
        if module not in apart and isinstance(module, (Block, nn.Embedding)):
            fully_shard(module)
    fully_shard(net)

In numbers: they are those of tied weights, as without sharding, which FSDP1's were not (measured: 7e-3 of the loss at
the second step).

Known limits: ties that the program does not spell out (a library's `tie_weights()`) are not seen; where a policy parts
them, `fully_shard` says so at the first forward. A policy that is asked at run time is not guarded.
"""

from __future__ import annotations

import re

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..module import Module
from ..plan import MODEL, UNIT, Order
from ..wraps import Wrap

SOURCES = ("fsdp1", "ddp", "deepspeed")

HELPER = '''def tied_apart(model):
    """The modules that share a parameter with a module outside of them: none of them can be a group of its own."""
    holders = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            holders.setdefault(param, set()).add(module)
    shared = [modules for modules in holders.values() if len(modules) > 1]
    inside = {module: set(module.modules()) for module in model.modules()}
    return {m for m, inner in inside.items() if any(inner & modules and not modules <= inner for modules in shared)}'''


def complete(draft: Draft, wrap: Wrap) -> None:
    """Guard the loop where one of its conditions picks a module of a tie."""
    conditions = " ".join(draft.text(piece) for unit in wrap.plan.units for piece in unit.condition)
    if not conditions or wrap.plan.refused:
        return
    picked = set(re.findall(r"\w+", conditions))
    everything = conditions.startswith("not isinstance")
    for peer in draft.peers.values():
        for classes in _ties(peer):
            if everything or classes & picked:
                draft.helpers.setdefault("tied_apart", HELPER)
                apart = draft.throwaway("apart", "tied_modules")
                wrap.plan.step(Order.PREPARE, (f"{apart} = tied_apart({MODEL})",))
                wrap.plan.guards.append((f"{UNIT} not in {apart}",))
                draft.note(
                    wrap.call,
                    Grade.NUMERICS if wrap.source == "fsdp1" else Grade.EXACT,
                    "tied weights stay in one group, and tied; FSDP1 failed or parted them",
                )
                return


def _ties(draft: Draft) -> list[set[str]]:
    """For each `a.x = b.x` between parameters, the names of the classes of the modules on the two paths."""
    found = []
    for assign in draft.module.every(cst.Assign):
        target = assign.targets[0].target
        value = assign.value
        if not isinstance(target, cst.Attribute) or not isinstance(value, cst.Attribute):
            continue
        names = (target.attr.value, value.attr.value)
        if all(name in ("weight", "bias") for name in names) and not draft.module.skips(assign):
            found.append(_classes(draft, draft.module, target.value) | _classes(draft, draft.module, value.value))
    return found


def _classes(draft: Draft, module: Module, path: cst.BaseExpression) -> set[str]:
    """The names of the classes of the modules on a path, without the one that it starts at."""
    found: set[str] = set()
    while isinstance(path, cst.Attribute):
        found |= {origin.name.rpartition(".")[2] for origin in draft.flow.origins(module, path) if origin.name}
        path = path.value
    return found
