"""Names the ckptkit convert command for each checkpoint that a migrated script loads.

What: nothing in the code. For `torch.load(path)`, `dcp.load(...)`, `FileSystemReader(path)` and DeepSpeed's
`load_checkpoint` in a file whose model is migrated the report prints a `ckptkit convert` line. The function that
`load_checkpoint` becomes finds what the line wrote, beside the old folder.

Why: files that hold FSDP1's ShardedTensors or flat parameters, or DeepSpeed's partitions, are not what the migrated
script reads.

Before and after: equal.

In numbers: nothing.

Known limits: a path that is computed is printed as its expression.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..syntax import argument_of

SOURCES = ("fsdp1", "deepspeed")
_CALLS = {
    "torch.load": (["f"], "f", "full"),
    "torch.distributed.checkpoint.FileSystemReader": (["path"], "path", "dcp"),
    "torch.distributed.checkpoint.filesystem.FileSystemReader": (["path"], "path", "dcp"),
    "torch.distributed.checkpoint.load": (["state_dict"], "checkpoint_id", "dcp"),
}


def rewrite(draft: Draft) -> None:
    """Collect the lines."""
    sharded = {wrap.source for wrap in draft.all_wraps if not wrap.plan.refused}
    for call in draft.module.every(cst.Call) if sharded else ():
        name = draft.flow.called(draft.module, call)
        path: cst.BaseExpression | None = None
        tag: cst.BaseExpression | None = None
        target = ""
        if name in _CALLS and "fsdp1" in sharded:
            positional, key, target = _CALLS[name]
            path = argument_of(call, positional, key)
        elif draft.code(call.func).endswith(".load_checkpoint") and _is_engine(draft, call.func):
            path, target = argument_of(call, ["load_dir"], "load_dir"), "dcp"
            tag = argument_of(call, ["load_dir", "tag"], "tag")
        if path is None:
            continue
        source = _text(draft, path)
        if tag is not None and draft.code(tag) != "None":
            source = f"{source.rstrip('/')}/{_text(draft, tag)}"
        stem, dot, suffix = source.rpartition(".")
        is_file = target == "full" and dot and stem and "/" not in suffix and "}" not in suffix
        new = f"{stem}.fsdp2.{suffix}" if is_file else f"{source.rstrip('/')}.fsdp2"
        draft.commands.append(f"ckptkit convert {source} {new} --to {target}")


def _is_engine(draft: Draft, func: cst.BaseExpression) -> bool:
    return isinstance(func, cst.Attribute) and bool(draft.wraps_of(func.value, "deepspeed"))


def _text(draft: Draft, path: cst.BaseExpression) -> str:
    origins = draft.origins(path)
    fixed = len(origins) == 1 and draft.flow.is_fixed(draft.module, path)
    for origin in origins if fixed else ():
        if isinstance(origin.node, cst.SimpleString):
            return str(origin.node.evaluated_value)
    return "{" + " ".join(draft.code(path).split()) + "}"
