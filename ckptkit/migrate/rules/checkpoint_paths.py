"""Says of each checkpoint that a migrated script loads what must be done about it: mostly nothing.

What: nothing in the code. Whole tensors (FULL_STATE_DICT, and all that a model loads before it is wrapped) and
checkpoints of torch.distributed.checkpoint are read as they are, and the report says so. For a checkpoint of
DeepSpeed's `load_checkpoint`, and for `torch.load(path)` in a program that saves other kinds of state dicts, it prints
a `ckptkit convert` line. The function that `load_checkpoint` becomes finds what the line wrote, beside the old folder.

Why: DeepSpeed's partitions, and files of torch.save that hold FSDP1's ShardedTensors or flat parameters, are not what
the migrated script reads. FSDP1's sharded checkpoints are: their names are the model's, and torch loads any boxes of a
tensor into any others.

Before and after: equal.

In numbers: nothing.

Known limits: a path that is computed is printed as its expression.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..state import CONTEXT, SETTER, read, settings
from ..syntax import argument_of

SOURCES = ("fsdp1", "deepspeed")
_DCP = "torch.distributed.checkpoint."
_READERS = (f"{_DCP}FileSystemReader", f"{_DCP}filesystem.FileSystemReader", f"{_DCP}load")


def rewrite(draft: Draft) -> None:
    """Collect the lines, and say what needs none."""
    sharded = {wrap.source for wrap in draft.all_wraps if not wrap.plan.refused}
    for call in draft.module.every(cst.Call) if sharded else ():
        name = draft.flow.called(draft.module, call)
        path: cst.BaseExpression | None = None
        tag: cst.BaseExpression | None = None
        if "fsdp1" in sharded and name in _READERS and not draft.module.skips(call):
            draft.note(call, Grade.EXACT, "a sharded checkpoint of the original is read as it is: nothing to convert")
        elif "fsdp1" in sharded and name == "torch.load":
            if _all_full(draft):
                draft.note(call, Grade.EXACT, "a file of the original is read as it is: nothing to convert")
            else:
                path = argument_of(call, ["f"], "f")
        elif draft.code(call.func).endswith(".load_checkpoint") and _is_engine(draft, call.func):
            path = argument_of(call, ["load_dir"], "load_dir")
            tag = argument_of(call, ["load_dir", "tag"], "tag")
        if path is None:
            continue
        source = _text(draft, path).rstrip("/")
        if tag is not None and draft.code(tag) != "None":
            source = f"{source}/{_text(draft, tag)}"
        draft.commands.append(f"ckptkit convert {source} {source}.fsdp2 --to dcp")


def _all_full(draft: Draft) -> bool:
    """Whether all state dicts of the program's FSDP1 models hold whole tensors."""
    found = [
        (peer, call) for peer in draft.peers.values() for name in (CONTEXT, SETTER) for call in settings(peer, name)
    ]
    return all(read(peer, call).name == "FULL" for peer, call in found)


def _is_engine(draft: Draft, func: cst.BaseExpression) -> bool:
    return isinstance(func, cst.Attribute) and bool(draft.wraps_of(func.value, "deepspeed"))


def _text(draft: Draft, path: cst.BaseExpression) -> str:
    origins = draft.origins(path)
    fixed = len(origins) == 1 and draft.flow.is_fixed(draft.module, path)
    for origin in origins if fixed else ():
        if isinstance(origin.node, cst.SimpleString):
            return str(origin.node.evaluated_value)
    return "{" + " ".join(draft.code(path).split()) + "}"
