"""Facts about sharding strategies, and the functions that make meshes of them and of FSDP1's groups at run time."""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .origin import NAME
from .wraps import Value

STRATEGY = "torch.distributed.fsdp.ShardingStrategy."
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

HELPER = '''def sharding_of(strategy, device_type="cuda"):
    """The arguments of fully_shard that do what a sharding strategy of FSDP1 did."""
    frees = strategy not in (STRATEGY.SHARD_GRAD_OP, STRATEGY._HYBRID_SHARD_ZERO2)
    world, local = DIST.get_world_size(), TORCH.get_device_module(device_type).device_count()
    if strategy == STRATEGY.NO_SHARD:
        mesh = MESH(device_type, (world, 1), mesh_dim_names=("replicate", "shard"))
    elif strategy in (STRATEGY.HYBRID_SHARD, STRATEGY._HYBRID_SHARD_ZERO2):
        mesh = MESH(device_type, (world // local, local), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = MESH(device_type, (world,))
    return {"mesh": mesh, "reshard_after_forward": frees}'''

WITH_GROUPS = (
    HELPER.replace('device_type="cuda"):', 'device_type="cuda", group=None):')
    .replace("strategy of FSDP1 did.", "strategy of FSDP1 did, over its group or (shard, replicate) groups.")
    .replace(
        "    if strategy == STRATEGY.NO_SHARD:\n",
        "    if group is not None and strategy == STRATEGY.NO_SHARD:\n"
        '        raise ValueError("NO_SHARD over a group: use DDP over that group")\n'
        "    if isinstance(group, (tuple, list)):\n        mesh = hybrid_mesh(group, device_type)\n"
        "    elif group is not None:\n        mesh = FROM.from_group(group, device_type)\n"
        "    elif strategy == STRATEGY.NO_SHARD:\n",
    )
)

PAIR = '''def hybrid_mesh(groups, device_type):
    """The mesh of FSDP1's (shard, replicate) pair of groups; all ranks must call."""
    shard, replicate = groups
    members = [None] * DIST.get_world_size()
    DIST.all_gather_object(members, DIST.get_process_group_ranks(shard))
    ranks = [members[rank] for rank in DIST.get_process_group_ranks(replicate)]
    names = ("replicate", "shard")
    return MESH.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=names)'''


def strategies(draft: Draft, value: Value) -> set[str] | None:
    """Names of the strategies that the value may be; None when it may be something unknown."""
    origins = draft.flow.origins(value.module, value.node)
    scope = value.module.scope(value.node)
    base = value.node.value if isinstance(value.node, cst.Attribute) else None
    if not origins and scope is not None and isinstance(base, cst.Name) and not scope[base.value]:
        # The name is bound nowhere: an import that was forgotten, in an example as a rule.
        return {value.node.attr.value} if base.value == "ShardingStrategy" else None  # type: ignore[attr-defined]
    names = {o.name.removeprefix(STRATEGY) for o in origins if o.kind == NAME and o.name.startswith(STRATEGY)}
    known = names and len(names) == len({o.name for o in origins})
    return names if known and draft.flow.is_fixed(value.module, value.node) else None
