"""process_group and device_mesh become mesh; the pair of a hybrid strategy is turned round.

What: `device_mesh=mesh` is `mesh=mesh`. `process_group=group` is `mesh=DeviceMesh.from_group(group, device_type)`.
The pair `(shard_group, replicate_group)` of HYBRID_SHARD becomes a 2-D mesh with the dims ("replicate", "shard"): the
other order.

Before::

    model = FSDP(model, process_group=group)

After::

    fully_shard(model, mesh=DeviceMesh.from_group(group, "cuda"))

In numbers: equal.

Known limits: a 2-D device_mesh must have names in FSDP2: where `init_device_mesh` is called without them they are
added. The layout of the ranks of a pair of groups is only known to the program: a TODO asks for the 2-D mesh.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..models import device_type
from ..origin import CALL
from ..rule import spell
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
    origins = draft.flow.origins(value.module, value.node)
    if any(isinstance(origin.node, (cst.Tuple, cst.List)) for origin in origins):
        wrap.plan.refuse(
            "process-group",
            "a (shard, replicate) pair of groups: build a 2-D mesh with "
            'DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))',
        )
        return
    here = spell(draft, wrap, value)
    if here is None:
        wrap.plan.refuse("process-group", f"process_group={wrap.text('process_group')} is out of reach at this call")
        return
    mesh = draft.need("torch.distributed.device_mesh", "DeviceMesh")
    wrap.plan.kwargs["mesh"] = (f"{mesh}.from_group(", *here, ", ", *device_type(draft, wrap), ")")
    wrap.plan.shared["mesh"] = ("mesh", "device_mesh")
    draft.note(wrap.call, Grade.EXACT, "process_group becomes a mesh of that group")
