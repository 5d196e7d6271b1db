"""Fact: which kind of state dict a call on an FSDP1 model answers or takes: full or sharded, where, and on which
ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from .draft import Draft
from .names import FSDP
from .origin import CALL, LITERAL
from .syntax import argument_of

TYPES = "torch.distributed.fsdp.StateDictType."
CONTEXT = FSDP + ".state_dict_type"
SETTER = FSDP + ".set_state_dict_type"
STATE = "torch.distributed.checkpoint.state_dict"
_RANK_WORDS = tuple(
    "rank==0 rank()==0 rank<1 notrank 0==rank is_main is_master master_process main_process is_rank_0 is_rank0 "
    "rank_zero rank0 is_primary is_chief is_global_zero".split()
)
_RANK_OF_NODE = re.compile(r"rank%[\w.()]+==0")
_PARAMETERS = ["module", "state_dict_type", "state_dict_config", "optim_state_dict_config"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A state dict type with its configs as far as the text tells. `name` is FULL, SHARDED, LOCAL or empty
    (unknown).
    """

    name: str = "FULL"
    offload: bool = False
    rank0: bool = False
    optim_offload: bool = True  # default of FullOptimStateDictConfig in torch 2.13
    optim_rank0: bool = False
    settled_by: cst.Call | None = None

    def model_options(self) -> list[str]:
        """Arguments of StateDictOptions for reading the model's state."""
        if self.name != "FULL":
            return ["cpu_offload=True"] if self.offload else []
        return ["full_state_dict=True", *(["cpu_offload=True"] if self.rank0 else [])]

    def optimizer_options(self) -> list[str]:
        """Arguments of StateDictOptions for reading the optimizer's state."""
        if self.name != "FULL":
            return ["cpu_offload=True"] if self.optim_offload and self.settled_by is not None and self.offload else []
        return ["full_state_dict=True", *(["cpu_offload=True"] if self.optim_rank0 else [])]


def settings(draft: Draft, name: str) -> list[cst.Call]:
    """All calls of `state_dict_type` or `set_state_dict_type`, as a method of the class or of a sharded model."""
    found = draft.calls(name)
    method = name.rpartition(".")[2]
    found += [call for call, _ in draft.methods(method, sources=("fsdp1",)) if call not in found]
    return found


def kind_at(draft: Draft, node: cst.CSTNode) -> Kind:
    """The kind in force where a state dict is made or taken.

    A `with FSDP.state_dict_type(...)` around it, in its function or around the calls of its function; else the last
    `set_state_dict_type` above it or, where there is only one, anywhere in the program; else FSDP1's default, FULL.
    """
    return _around(draft, node, 3) or _sticky(draft, node) or Kind()


def _around(draft: Draft, node: cst.CSTNode, depth: int) -> Kind | None:
    holder = draft.module.up(node, cst.With)
    while holder is not None:
        for item in holder.items:
            if isinstance(item.item, cst.Call) and item.item in settings(draft, CONTEXT):
                return read(draft, item.item)
        holder = draft.module.up(holder, cst.With)
    function = draft.module.function(node)
    if depth and isinstance(function, cst.FunctionDef):
        kinds = []
        for module, call in draft.flow.callers(draft.module, function):
            peer = draft.peers.get(id(module))
            kind = _around(peer, call, depth - 1) if peer is not None else None
            kinds.append(kind)
        if kinds and kinds[0] is not None and all(kind == kinds[0] for kind in kinds):
            return kinds[0]
    return None


def _sticky(draft: Draft, node: cst.CSTNode) -> Kind | None:
    here = [c for c in settings(draft, SETTER) if draft.module.function(c) is draft.module.function(node)]
    above = [c for c in here if draft.module.span(c).start < draft.module.span(node).start]
    if above:
        return read(draft, above[-1])
    if here and not draft.module.loops(node):
        return None  # set further down only: FSDP1's default holds here
    anywhere = [(peer, c) for peer in draft.peers.values() for c in settings(peer, SETTER)]
    if len(anywhere) == 1:
        return read(*anywhere[0])
    return Kind(name="") if anywhere and not above else None


def read(draft: Draft, call: cst.Call) -> Kind:
    """The kind that a `state_dict_type` or `set_state_dict_type` call sets."""
    parameters = _PARAMETERS
    if (
        isinstance(call.func, cst.Attribute)
        and draft.wraps_of(call.func.value, "fsdp1")
        and not _gives_model(draft, call)
    ):
        parameters = _PARAMETERS[1:]
    given = {name: argument_of(call, parameters, name) for name in _PARAMETERS}
    chosen = given["state_dict_type"]
    name = draft.name(chosen) if chosen is not None else ""
    kind = name.removeprefix(TYPES).removesuffix("_STATE_DICT") if name.startswith(TYPES) else ""
    offload, rank0 = _config(draft, given["state_dict_config"], False)
    optim_offload, optim_rank0 = _config(draft, given["optim_state_dict_config"], True)
    return Kind(kind, offload, rank0, optim_offload, optim_rank0, call)


def model_of(draft: Draft, call: cst.Call) -> cst.BaseExpression | None:
    """The model that such a call is about."""
    if (
        isinstance(call.func, cst.Attribute)
        and draft.wraps_of(call.func.value, "fsdp1")
        and not _gives_model(draft, call)
    ):
        return call.func.value
    return argument_of(call, _PARAMETERS, "module")


def _gives_model(draft: Draft, call: cst.Call) -> bool:
    first = call.args[0] if call.args else None
    return (
        first is not None
        and (first.keyword is None or first.keyword.value == "module")
        and bool(draft.wraps_of(first.value, "fsdp1"))
    )


def _config(draft: Draft, node: cst.BaseExpression | None, offload: bool) -> tuple[bool, bool]:
    """(offload_to_cpu, rank0_only) of a config object that the text shows; its defaults where it does not."""
    if node is None:
        return offload, False
    for origin in draft.origins(node):
        if origin.kind == CALL and isinstance(origin.node, cst.Call):
            positional = ["offload_to_cpu", "rank0_only"]
            values = []
            for name, default in (("offload_to_cpu", offload), ("rank0_only", False)):
                value = argument_of(origin.node, positional, name)
                values.append(default if value is None else origin.module.code(value) != "False")
            return values[0], values[1]
        if origin.kind == LITERAL and origin.name == "None":
            continue
    return offload, False


def options(draft: Draft, arguments: list[str]) -> str:
    """`, options=StateDictOptions(...)`, or nothing."""
    if not arguments:
        return ""
    name = draft.need(STATE, "StateDictOptions")
    return f", options={name}({', '.join(arguments)})"


def only_on_rank_0(draft: Draft, node: cst.BaseExpression) -> bool:
    """Whether a value exists on rank 0 only: it may be None or empty, or is made under a rank guard."""
    origins = draft.origins(node)
    empty = any(
        (o.kind == LITERAL and o.name == "None") or (isinstance(o.node, cst.Dict) and not o.node.elements)
        for o in origins
    )
    guarded = any(
        o.kind == CALL and isinstance(o.node, cst.Call) and rank_guard(draft.peers[id(o.module)], o.node) is not None
        for o in origins
        if id(o.module) in draft.peers
    )
    return empty or guarded


def may_be_none(draft: Draft, node: cst.BaseExpression) -> bool:
    """Whether a value may be None."""
    return any(o.kind == LITERAL and o.name == "None" for o in draft.origins(node))


def rank_guard(draft: Draft, node: cst.CSTNode) -> cst.If | None:
    """The outermost `if rank == 0:` (or `is_main_process` and the like) around a node within its function."""
    found = None
    at: cst.CSTNode = node
    for holder in draft.module.ancestors(node):
        if isinstance(holder, (cst.FunctionDef, cst.Lambda)):
            break
        if isinstance(holder, cst.If) and at is holder.body and is_rank_test(draft.code(holder.test)):
            found = holder
        at = holder
    return found


def is_rank_test(text: str) -> bool:
    """Whether the text of a condition asks for one rank: `rank == 0`, `not rank`, `is_main_process()`,
    `dist.get_rank() < 1`.
    """
    squeezed = text.replace(" ", "").lower()
    if re.fullmatch(r"not[\w.()]+", squeezed) and " or " not in text and " and " not in text:
        return squeezed.removesuffix("()").endswith("rank")
    return any(word in squeezed for word in _RANK_WORDS) or bool(_RANK_OF_NODE.search(squeezed))
