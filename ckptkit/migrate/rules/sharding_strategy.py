"""sharding_strategy becomes reshard_after_forward, and a mesh for hybrid and unsharded strategies.

What: FULL_SHARD and None need nothing (the root is never freed after forward, in FSDP1 as in FSDP2's default).
SHARD_GRAD_OP is `reshard_after_forward=False`. HYBRID_SHARD and _HYBRID_SHARD_ZERO2 shard within a node and replicate
across nodes: a 2-D mesh with named dims. NO_SHARD is a mesh that shards over one rank and replicates over all.

Before::

    model = FSDP(model, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.HYBRID_SHARD)

After::

    mesh = init_device_mesh(
        "cuda",
        (dist.get_world_size() // torch.cuda.device_count(), torch.cuda.device_count()),
        mesh_dim_names=("replicate", "shard"),
    )
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)

In numbers: equal.

A strategy that is only known at run time stays a run-time choice, made by `sharding_of(strategy)`, a function that is
written into the file.

Known limits: with SHARD_GRAD_OP FSDP1 also kept parameters gathered after
a backward under no_sync; `set_reshard_after_backward` would do so (performance only). Default groups read in torch
2.13 torch/distributed/fsdp/_init_utils.py (_init_intra_and_inter_node_groups).
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..models import device_kind, device_type
from ..plan import Line, Order
from ..rule import spell
from ..shard import negated
from ..strategies import HELPER, HYBRID, PAIR, STRATEGY, WITH_GROUPS, strategies
from ..wraps import Value, Wrap

SOURCES = ("fsdp1",)


def plan(draft: Draft, wrap: Wrap) -> None:
    """Set reshard_after_forward, and a mesh where the strategy implies one."""
    value = wrap.get("sharding_strategy")
    if value is None:
        return
    names = strategies(draft, value)
    if names is None or len(names) != 1:
        _at_run_time(draft, wrap, value, names)
        return
    name = names.pop()
    if name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        wrap.plan.kwargs["reshard_after_forward"] = ("False",)
    has_mesh = any(wrap.text(one) not in ("", "None") for one in ("process_group", "device_mesh"))
    if name in HYBRID and not has_mesh:
        wrap.plan.kwargs["mesh"] = _mesh(draft, wrap, hybrid=True)
    elif name == "NO_SHARD":
        if has_mesh:
            wrap.plan.refuse(
                "sharding-strategy", "NO_SHARD over a process group or mesh: use DDP, or a (ranks, 1) mesh"
            )
            return
        wrap.plan.kwargs["mesh"] = _mesh(draft, wrap, hybrid=False)
    if not has_mesh:
        wrap.plan.shared["mesh"] = ("mesh", "device_mesh")
    draft.note(wrap.call, Grade.EXACT, f"sharding_strategy {name} is spelled as reshard_after_forward and mesh")


def _at_run_time(draft: Draft, wrap: Wrap, value: Value, names: set[str] | None) -> None:
    here = spell(draft, wrap, value)
    if here is None:
        text = wrap.text("sharding_strategy")
        wrap.plan.refuse("sharding-strategy", f"sharding_strategy={text} is out of reach at this call")
        return
    has_mesh = any(wrap.text(one) not in ("", "None") for one in ("process_group", "device_mesh"))
    draft.note(wrap.call, Grade.EXACT, "the choice of a sharding_strategy at run time stays one")
    if "group" in wrap.facts:
        _any_strategy(draft, wrap, here)
        return
    if isinstance(value.node, cst.IfExp) and names == {"FULL_SHARD", "SHARD_GRAD_OP"}:
        body = draft.flow.name(value.module, value.node.body).removeprefix(STRATEGY)
        test = value.module.quote(value.node.test)
        if not isinstance(value.node.test, (cst.Comparison, cst.UnaryOperation)):
            test = ("bool(", *test, ")")  # fully_shard takes an integer for a number of ranks
        keep = test if body == "FULL_SHARD" else negated(value.module, value.node.test)
        wrap.plan.kwargs["reshard_after_forward"] = keep
    elif has_mesh or (names is not None and names <= {"FULL_SHARD", "SHARD_GRAD_OP"}):
        frees = (f"({_strategy(draft)}.SHARD_GRAD_OP, {_strategy(draft)}._HYBRID_SHARD_ZERO2)",)
        plain = names is not None and "_HYBRID_SHARD_ZERO2" not in names
        test = (f" != {_strategy(draft)}.SHARD_GRAD_OP",) if plain else (" not in ", *frees)
        wrap.plan.kwargs["reshard_after_forward"] = (*_grouped(here, value), *test)
    else:
        _any_strategy(draft, wrap, here)
        return
    _root_stays(wrap)


def _any_strategy(draft: Draft, wrap: Wrap, strategy: Line) -> None:
    """Mesh and resharding from a function that is written into the file."""
    if "sharding_of" not in draft.helpers:
        text = HELPER.replace("STRATEGY", _strategy(draft)).replace("TORCH", draft.need_module("torch"))
        if any("group" in one.facts for one in draft.wraps):
            text = WITH_GROUPS.replace("STRATEGY", _strategy(draft)).replace("TORCH", draft.need_module("torch"))
            pair = PAIR.replace("MESH", draft.need("torch.distributed.device_mesh", "DeviceMesh"))
            draft.helpers["hybrid_mesh"] = pair.replace("DIST", draft.need_module("torch.distributed", "dist"))
            text = text.replace("FROM", draft.need("torch.distributed.device_mesh", "DeviceMesh"))
        text = text.replace("DIST", draft.need_module("torch.distributed", "dist"))
        draft.helpers["sharding_of"] = text.replace(
            "MESH", draft.need("torch.distributed.device_mesh", "init_device_mesh")
        )
    wrap.plan.kwargs.pop("mesh", None)  # of a CPU device: the function makes the mesh
    kind = device_type(draft, wrap)
    extra: Line = () if kind == ('"cuda"',) else (", ", *kind)
    if "group" in wrap.facts:
        extra = (*extra, ", group=", *wrap.facts["group"])  # type: ignore[misc]
    call: Line = ("sharding_of(", *strategy, *extra, ")")
    if wrap.text("auto_wrap_policy") in ("", "None"):
        wrap.plan.kwargs["**"] = call
        return
    name = draft.fresh("sharding", "fsdp_sharding")
    wrap.plan.step(Order.PREPARE, (f"{name} = ", *call))
    wrap.plan.child_kwargs["**"] = (name,)
    wrap.plan.root_kwargs["**"] = (f'{{**{name}, "reshard_after_forward": False}}',)


def _strategy(draft: Draft) -> str:
    return draft.need("torch.distributed.fsdp", "ShardingStrategy")


def _grouped(line: Line, value: Value) -> Line:
    return line if isinstance(value.node, (cst.Name, cst.Attribute)) or value.node.lpar else ("(", *line, ")")


def _root_stays(wrap: Wrap) -> None:
    """The root is never resharded after forward, whatever the strategy."""
    wrap.plan.child_kwargs["reshard_after_forward"] = wrap.plan.kwargs.pop("reshard_after_forward")
    if not wrap.plan.units and wrap.text("auto_wrap_policy") in ("", "None"):
        wrap.plan.child_kwargs.pop("reshard_after_forward")


def _mesh(draft: Draft, wrap: Wrap, *, hybrid: bool) -> Line:
    mesh = draft.need("torch.distributed.device_mesh", "init_device_mesh")
    dist = draft.need_module("torch.distributed", "dist")
    kind = device_type(draft, wrap)
    if not hybrid:
        return (f"{mesh}(", *kind, f', ({dist}.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))')
    torch = draft.need_module("torch")
    module = "cpu" if device_kind(draft, wrap.args.get("device_id")) == "cpu" else "cuda"
    step = draft.module.step()
    local = f"{torch}.{module}.device_count()"
    return (
        f"{mesh}(\n{step}",
        *kind,
        f',\n{step}({dist}.get_world_size() // {local}, {local}),\n{step}mesh_dim_names=("replicate", "shard"),\n)',
    )
