"""process_group and device_mesh become mesh; the pair of a hybrid strategy is turned round.

What: `device_mesh=mesh` is `mesh=mesh`. `process_group=group` is `mesh=DeviceMesh.from_group(group, device_type)`.
The pair `(shard_group, replicate_group)` of HYBRID_SHARD becomes a 2-D mesh with the dims ("replicate", "shard"): the
other order.

Before::

    model = FSDP(model, process_group=group)

After::

    fully_shard(model, mesh=DeviceMesh.from_group(group, "cuda"))

In numbers: equal.

A pair is turned into a mesh at run time by `hybrid_mesh`, a function written into the file: the ranks of the groups
tell the layout.

Known limits: a 2-D device_mesh must have names in FSDP2: where `init_device_mesh` is called without them they are
added. Groups that do not go by rows and columns of ranks (rank n of each shard group in one replicate group) were no
mesh for FSDP1 either.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..models import device_type
from ..origin import CALL, LITERAL
from ..rule import spell
from ..strategies import HYBRID, PAIR, strategies
from ..syntax import argument_of
from ..wraps import Value, Wrap

SOURCES = ("fsdp1",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Set the mesh of every call."""
    mesh = wrap.get("device_mesh")
    group = wrap.get("process_group")
    if mesh is not None:
        _mesh(draft, wrap, mesh)
    elif group is not None:
        _group(draft, wrap, group)


def _mesh(draft: Draft, wrap: Wrap, value: Value) -> None:
    here = spell(draft, wrap, value)
    if here is None:
        wrap.plan.refuse("process-group", f"device_mesh={wrap.text('device_mesh')} is out of reach at this call")
        return
    wrap.plan.kwargs["mesh"] = here
    if not isinstance(value.node, (cst.Name, cst.Attribute)):
        wrap.plan.shared["mesh"] = ("mesh", "device_mesh")
    draft.note(wrap.call, Grade.EXACT, "device_mesh becomes mesh")
    for origin in draft.flow.origins(value.module, value.node):
        call = origin.node
        if origin.kind != CALL or not origin.name.endswith(".init_device_mesh") or not isinstance(call, cst.Call):
            continue
        shape = argument_of(call, ["device_type", "mesh_shape", "mesh_dim_names"], "mesh_shape")
        names = argument_of(call, ["device_type", "mesh_shape", "mesh_dim_names"], "mesh_dim_names")
        if isinstance(shape, cst.Tuple) and len(shape.elements) == 2 and names is None:
            peer = draft.peers[id(origin.module)]
            span = peer.module.span(call.args[-1].value)
            text = peer.module.code(call.args[-1].value)
            depth = len(getattr(call.args[-1].value, "lpar", ()))
            if text and depth == 0:
                peer.replace_span(span, span, ', mesh_dim_names=("replicate", "shard")')
            else:
                whole = peer.module.span(call.args[-1])
                peer.replace_span(whole, whole, ', mesh_dim_names=("replicate", "shard")')
            peer.note(call, Grade.EXACT, "a 2-D mesh needs names in FSDP2", rule="process-group")


def _group(draft: Draft, wrap: Wrap, value: Value) -> None:
    here = spell(draft, wrap, value)
    if here is None:
        wrap.plan.refuse("process-group", f"process_group={wrap.text('process_group')} is out of reach at this call")
        return
    origins = draft.flow.origins(value.module, value.node)
    pairs = [o for o in origins if isinstance(o.node, (cst.Tuple, cst.List))]
    none = [o for o in origins if o.kind == LITERAL and o.name == "None"]
    simple = isinstance(value.node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.Tuple)) or value.node.lpar
    if not simple:
        here = ("(", *here, ")")
    strategy = wrap.args.get("sharding_strategy")
    names = strategies(draft, strategy) if strategy is not None else {"FULL_SHARD"}
    hybrid = names is None or bool(names & set(HYBRID))
    if (pairs or hybrid) and (none or names is None or len(names) > 1):
        wrap.facts["group"] = here  # groups or none, as the strategy wants them: the two are asked together
        return
    if pairs or hybrid:
        if "hybrid_mesh" not in draft.helpers:
            text = PAIR.replace("MESH", draft.need("torch.distributed.device_mesh", "DeviceMesh"))
            draft.helpers["hybrid_mesh"] = text.replace("DIST", draft.need_module("torch.distributed", "dist"))
        wrap.plan.kwargs["mesh"] = ("hybrid_mesh(", *here, ", ", *device_type(draft, wrap), ")")
        message = "the (shard, replicate) pair of groups becomes a mesh, which names them in the other order"
    else:
        if none:
            here = (*here, f" or {draft.need_module('torch.distributed', 'dist')}.group.WORLD")
        mesh = draft.need("torch.distributed.device_mesh", "DeviceMesh")
        wrap.plan.kwargs["mesh"] = (f"{mesh}.from_group(", *here, ", ", *device_type(draft, wrap), ")")
        message = "process_group becomes a mesh of that group"
    wrap.plan.shared["mesh"] = ("mesh", "device_mesh")
    draft.note(wrap.call, Grade.EXACT, message)
