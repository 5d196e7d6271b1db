"""What a DeepSpeed script does around the engine becomes torch.distributed: process group, collectives, arguments.

What: `deepspeed.init_distributed(...)` becomes `init_process_group` (if there is none yet), `deepspeed.comm` becomes
`torch.distributed`, `deepspeed.add_config_arguments(parser)` goes, and a `--local_rank` argument takes its default
from the environment.

Why: `torchrun` gives ranks in environment variables, where the `deepspeed` launcher passed `--local_rank`.

Before::

    deepspeed.init_distributed()
    parser.add_argument("--local_rank", type=int, default=-1)

After::

    if not dist.is_initialized():
        dist.init_process_group()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))

In numbers: equal.

Known limits: MPI discovery (`auto_mpi_discovery`) has no counterpart: launch with torchrun. Scripts that are launched
with `--deepspeed` or `--deepspeed_config` must be launched without.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..syntax import argument_of

SOURCES = ("deepspeed",)

_INIT = ("deepspeed.init_distributed", "deepspeed.comm.init_distributed", "deepspeed.comm.comm.init_distributed")
_PARAMETERS = [
    "dist_backend",
    "auto_mpi_discovery",
    "distributed_port",
    "verbose",
    "timeout",
    "init_method",
    "dist_init_required",
    "config",
    "rank",
    "world_size",
]
_COMM = ("deepspeed.comm.comm.", "deepspeed.comm.")
_SAME = frozenset(
    "get_rank get_world_size is_initialized barrier all_reduce broadcast all_gather reduce reduce_scatter gather "
    "scatter all_gather_into_tensor reduce_scatter_tensor all_to_all_single new_group ReduceOp send recv isend irecv "
    "destroy_process_group broadcast_object_list all_gather_object is_available get_backend".split()
)


def rewrite(draft: Draft) -> None:
    """Rewrite all of it, unless an engine stays: then what is around it stays, too."""
    wraps = [wrap for wrap in draft.all_wraps if wrap.source == "deepspeed"]
    if any(wrap.plan.refused for wrap in wraps):
        return
    for call in draft.calls(*_INIT):
        _init(draft, call)
    _comm(draft)
    for call in draft.calls("deepspeed.add_config_arguments"):
        statement = draft.module.statement(call)
        if isinstance(statement, (cst.Assign, cst.Expr)) and statement.value is call:
            draft.delete(statement)
        else:
            given = argument_of(call, ["parser"], "parser")
            if given is not None:
                draft.replace(call, *draft.module.quote(given))
        draft.note(call, Grade.EXACT, "DeepSpeed's arguments go: launch without --deepspeed and --deepspeed_config")
    if wraps:
        _local_rank(draft)


def _init(draft: Draft, call: cst.Call) -> None:
    dist = draft.need_module("torch.distributed", "dist")
    offloads = any("offload_policy" in wrap.plan.kwargs for wrap in draft.all_wraps)
    arguments: list = []
    for name, new in (
        ("dist_backend", "backend"),
        ("timeout", "timeout"),
        ("init_method", "init_method"),
        ("rank", "rank"),
        ("world_size", "world_size"),
    ):
        given = argument_of(call, _PARAMETERS, name)
        if given is None or (name == "dist_backend" and offloads):
            continue  # offloaded gradients are clipped on the CPU: the default has a backend for both
        arguments += [", " if arguments else "", f"{new}=", *draft.module.quote(given)]
    if isinstance(draft.module.parent(call), cst.Expr):
        step = draft.module.step()
        lines = [(f"if not {dist}.is_initialized():",), (f"{step}{dist}.init_process_group(", *arguments, ")")]
        draft.statement_becomes(call, lines)
    else:
        draft.replace(call, f"{dist}.init_process_group(", *arguments, ")")
    draft.note(call, Grade.EXACT, "init_distributed becomes init_process_group")


def _comm(draft: Draft) -> None:
    module = draft.module
    for node in module.every(cst.Name, cst.Attribute):
        parent = module.parent(node)
        if isinstance(parent, cst.Attribute) and parent.attr is node:
            continue
        if module.up(node, cst.Import, cst.ImportFrom) is not None or module.skips(node):
            continue
        name = draft.name(node)
        prefix = next((p for p in _COMM if name.startswith(p)), None)
        if prefix is None or name.removeprefix(prefix).split(".")[0] not in _SAME:
            continue
        if isinstance(parent, cst.Attribute) and draft.name(parent) == f"{name}.{parent.attr.value}":
            continue  # the longer name is rewritten
        dist = draft.need_module("torch.distributed", "dist")
        draft.replace(node, f"{dist}.{name.removeprefix(prefix)}")
        draft.note(node, Grade.EXACT, "deepspeed.comm becomes torch.distributed")


def _local_rank(draft: Draft) -> None:
    for call in draft.module.every(cst.Call):
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "add_argument":
            continue
        names = [str(a.value.evaluated_value) for a in call.args if isinstance(a.value, cst.SimpleString)]
        if not {"--local_rank", "--local-rank"} & set(names):
            continue
        os = draft.need_module("os")
        default = argument_of(call, [], "default")
        if default is not None and isinstance(default, (cst.Integer, cst.UnaryOperation)):
            draft.replace(default, f'int({os}.environ.get("LOCAL_RANK", {draft.code(default)}))')
            draft.note(call, Grade.EXACT, "torchrun gives the local rank in the environment")
        elif default is None:
            last = call.args[-1].value
            draft.replace(last, *draft.module.quote(last), f', default=int({os}.environ.get("LOCAL_RANK", 0))')
            draft.note(call, Grade.EXACT, "torchrun gives the local rank in the environment")
