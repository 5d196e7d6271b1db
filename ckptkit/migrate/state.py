"""Fact: which kind of state dict a call on an FSDP1 model answers or takes: full or sharded, where, and on which
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from .draft import Draft
from .edit import Piece
from .names import FSDP
from .origin import CALL, LITERAL
from .plan import Line
from .ranks import rank_guard
from .rule import spell_at
from .shard import negated
from .syntax import argument_of
from .wraps import Value, dict_entries

TYPES = "torch.distributed.fsdp.StateDictType."
CONTEXT = FSDP + ".state_dict_type"
SETTER = FSDP + ".set_state_dict_type"
GETTER = FSDP + ".get_state_dict_type"
STATE = "torch.distributed.checkpoint.state_dict"
_PARAMETERS = ["module", "state_dict_type", "state_dict_config", "optim_state_dict_config"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A state dict type with its configs as far as the text tells. `name` is FULL, SHARDED, LOCAL, CHOSEN (FULL where
    `test` holds at run time, else SHARDED) or empty (unknown).
    """

    name: str = "FULL"
    offload: bool = False
    rank0: bool = False
    optim_offload: bool = True  # default of FullOptimStateDictConfig in torch 2.13
    optim_rank0: bool = False
    settled_by: cst.Call | None = None
    test: Line = ()

    @property
    def left(self) -> bool:
        """Whether what it means for a state dict is a person's matter."""
        return self.name in ("LOCAL", "")

    @property
    def is_full(self) -> Line:
        """The option that says at run time whether it is FULL."""
        return ("full_state_dict=", *self.test)

    def model_options(self) -> list[str | Line]:
        """Arguments of StateDictOptions for reading the model's state."""
        if self.name == "CHOSEN":
            return [self.is_full]
        if self.name != "FULL":
            return ["cpu_offload=True"] if self.offload else []
        return ["full_state_dict=True", *(["cpu_offload=True"] if self.rank0 else [])]

    def optimizer_options(self) -> list[str | Line]:
        """Arguments of StateDictOptions for reading the optimizer's state."""
        if self.name == "CHOSEN":
            return [self.is_full]
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
            if draft.module.within(node, item):
                continue
            kinds = [read(*one) for one in _contexts_of(draft, item.item)]
            if kinds:
                entered = len(draft.origins(item.item)) <= len(kinds)  # else a `nullcontext()` may stand in its place
                alike = all(kind == kinds[0] for kind in kinds) and (entered or kinds[0].name == "FULL")
                return _in_sight(draft, kinds[0], node) if alike else Kind(name="")
        holder = draft.module.up(holder, cst.With)
    function = draft.module.function(node)
    if depth and isinstance(function, cst.FunctionDef):
        found = []
        for module, call in draft.flow.callers(draft.module, function):
            peer = draft.peers.get(id(module))
            kind = _around(peer, call, depth - 1) if peer is not None else None
            found.append(kind)
        if found and found[0] is not None and all(kind == found[0] for kind in found):
            return _in_sight(draft, found[0], node)
    return None


def _contexts_of(draft: Draft, item: cst.BaseExpression) -> list[tuple[Draft, cst.Call]]:
    """The `state_dict_type` calls whose context an item of a `with` may enter, also through a function that makes or
    wraps it (`@contextmanager`).
    """
    known = {(id(peer.module), id(call)): (peer, call) for peer, call in _all_contexts(draft)}
    found = [known[id(o.module), id(o.node)] for o in draft.origins(item) if (id(o.module), id(o.node)) in known]
    if found or not isinstance(item, cst.Call):
        return found
    for origin in draft.origins(item.func):
        if isinstance(origin.node, cst.FunctionDef) and origin.module.inside(origin.node, cst.Yield):
            for peer, call in known.values():
                if peer.module is origin.module and peer.module.function(call) is origin.node:
                    yields = peer.module.inside(peer.module.statement(call), cst.Yield)
                    found += [(peer, call)] if yields else []
    return found


def _all_contexts(draft: Draft) -> list[tuple[Draft, cst.Call]]:
    return [(peer, call) for peer in draft.peers.values() for call in settings(peer, CONTEXT)]


def _in_sight(draft: Draft, kind: Kind, node: cst.CSTNode) -> Kind:
    """A kind as it is known at a node: a choice of the run only where its test means the same there."""
    if kind.name != "CHOSEN" or kind.settled_by is None:
        return kind
    here = draft.module.scope(node) is not None and any(c is kind.settled_by for c in draft.module.every(cst.Call))
    same = here and draft.module.function(node) is draft.module.function(kind.settled_by)
    return kind if same else Kind(name="")


def _sticky(draft: Draft, node: cst.CSTNode) -> Kind | None:
    here = [c for c in settings(draft, SETTER) if draft.module.function(c) is draft.module.function(node)]
    above = [c for c in here if draft.module.span(c).start < draft.module.span(node).start]
    if above:
        return _in_sight(draft, read(draft, above[-1]), node)
    if here and not draft.module.loops(node):
        return None  # set further down only: FSDP1's default holds here
    anywhere = [(peer, c) for peer in draft.peers.values() for c in settings(peer, SETTER)]
    if len(anywhere) == 1:
        return _in_sight(draft, read(*anywhere[0]), node)
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
    given = _given(draft, call, parameters)
    chosen = given.get("state_dict_type")
    restored = _restored(draft, chosen)
    if restored is not None:
        return restored
    name, test = _type(draft, call, chosen)
    offload, rank0 = _config(draft, given.get("state_dict_config"), False)
    optim_offload, optim_rank0 = _config(draft, given.get("optim_state_dict_config"), True)
    if name == "CHOSEN" and len(given) > (2 if "module" in given else 1):
        name = ""  # configs of several kinds: which is whose, the run tells
    return Kind(name, offload, rank0, optim_offload, optim_rank0, call, test)


def _given(draft: Draft, call: cst.Call, parameters: list[str]) -> dict[str, Value]:
    """The arguments by name, those of a `**dict` that is known included."""
    found = {}
    for name in _PARAMETERS:
        value = argument_of(call, parameters, name)
        if value is not None:
            found[name] = Value(draft.module, value)
    for argument in call.args:
        if argument.star == "**":
            found.update(dict_entries(draft.flow, draft.module, argument.value) or {})
    return found


def carriers(draft: Draft, call: cst.Call) -> list[cst.CSTNode]:
    """The statements that make the dicts which a call takes by `**`."""
    origins = [o for a in call.args if a.star == "**" for o in draft.origins(a.value) if o.module is draft.module]
    return [draft.module.statement(origin.node) for origin in origins]


def _restored(draft: Draft, chosen: Value | None) -> Kind | None:
    """For `old.state_dict_type`, where `old` is what a setter or getter answered: the kind that held there."""
    node = chosen.node if chosen is not None else None
    if chosen is None or chosen.module is not draft.module:
        return None
    if not isinstance(node, cst.Attribute) or node.attr.value != "state_dict_type":
        return None
    for origin in draft.origins(node.value):
        if origin.kind == CALL and origin.name in (SETTER, GETTER) and origin.module is draft.module:
            return kind_at(draft, origin.node)
    return None


def _type(draft: Draft, call: cst.Call, chosen: Value | None) -> tuple[str, Line]:
    """The name of a state dict type; with CHOSEN the test, valid at the call, of whether it is FULL."""
    if chosen is None:
        return "", ()
    names = {
        origin.name.removeprefix(TYPES).removesuffix("_STATE_DICT")
        for origin in draft.flow.origins(chosen.module, chosen.node)
        if origin.name.startswith(TYPES)
    }
    fixed = draft.flow.is_fixed(chosen.module, chosen.node)
    if len(names) == 1 and draft.flow.name(chosen.module, chosen.node) and fixed:
        return names.pop(), ()
    if "LOCAL" in names or chosen.module is not draft.module or not spell_at(draft.module, call, chosen.node):
        return "", ()
    node = chosen.node
    if isinstance(node, cst.IfExp) and names == {"FULL", "SHARDED"}:
        full_first = draft.name(node.body) == TYPES + "FULL_STATE_DICT"
        return "CHOSEN", draft.module.quote(node.test) if full_first else negated(draft.module, node.test)
    kinds = draft.need("torch.distributed.fsdp", "StateDictType")
    simple = isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) or bool(node.lpar)
    text = draft.module.quote(node)
    return "CHOSEN", (*(text if simple else ("(", *text, ")")), f" == {kinds}.FULL_STATE_DICT")


def model_of(draft: Draft, call: cst.Call) -> cst.BaseExpression | None:
    """The model that such a call is about."""
    if (
        isinstance(call.func, cst.Attribute)
        and draft.wraps_of(call.func.value, "fsdp1")
        and not _gives_model(draft, call)
    ):
        return call.func.value
    given = _given(draft, call, _PARAMETERS).get("module")
    return given.node if given is not None and given.module is draft.module else None


def _gives_model(draft: Draft, call: cst.Call) -> bool:
    first = call.args[0] if call.args else None
    return (
        first is not None
        and (first.keyword is None or first.keyword.value == "module")
        and bool(draft.wraps_of(first.value, "fsdp1"))
    )


def _config(draft: Draft, given: Value | None, offload: bool) -> tuple[bool, bool]:
    """(offload_to_cpu, rank0_only) of a config object that the text shows; its defaults where it does not."""
    if given is None:
        return offload, False
    for origin in draft.flow.origins(given.module, given.node):
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


def options(draft: Draft, arguments: Sequence[str | Line]) -> Line:
    """`, options=StateDictOptions(...)`, or nothing."""
    if not arguments:
        return ()
    name = draft.need(STATE, "StateDictOptions")
    pieces: list[Piece] = [f", options={name}("]
    for index, argument in enumerate(arguments):
        pieces += [*([", "] if index else []), *((argument,) if isinstance(argument, str) else argument)]
    return (*pieces, ")")


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
