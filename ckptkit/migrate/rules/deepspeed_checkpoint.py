"""save_checkpoint, load_checkpoint and save_16bit_model of an engine become functions on torch.distributed.checkpoint.

What: two functions are written into the file: `save_checkpoint` writes model and optimizer as a DCP folder under the
tag, scheduler, counters and client state beside it, and the tag into `latest`; `load_checkpoint` reads them and
answers the path and the client state. `save_16bit_model` gathers the whole model and saves it in bf16 (or fp16).

Why: the engine wrote its partitions, which only it reads.

Before::

    engine.save_checkpoint(folder, client_state={"epoch": epoch})
    _, state = engine.load_checkpoint(folder)

After::

    save_checkpoint(folder, None, engine, optimizer, scheduler, {"epoch": epoch}, global_steps)
    _, state, global_steps = load_checkpoint(folder, None, engine, optimizer, scheduler)

In numbers: equal.

Known limits: DeepSpeed's own checkpoints must be converted once: the report prints the `ckptkit convert` line. Options
that leave out a part of the state are left with a TODO. Where nothing is found, `(None, {})` is answered, as before.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..ds_setup import Setup, setup_at
from ..grade import Grade
from ..plan import Line
from ..state import STATE
from ..syntax import argument_of

SOURCES = ("deepspeed",)

SAVE = '''def save_checkpoint(folder, tag, model, optimizer, scheduler, client_state, global_steps):
    """Write model and optimizer as a checkpoint folder, all else beside them, and the tag into `latest`."""
    tag = str(tag) if tag is not None else f"global_step{global_steps}"
    path = OS.path.join(folder, tag)
    weights, moments = GET(model, optimizer)
    DCP.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    if DIST.get_rank() == 0:
        schedule = scheduler.state_dict() if scheduler is not None else None
        TORCH.save({"scheduler": schedule, "steps": global_steps, "client": client_state or {}}, f"{path}/rest.pt")
        with open(OS.path.join(folder, "latest"), "w") as stream:
            stream.write(tag)
    DIST.barrier()
    return True'''

LOAD = '''def load_checkpoint(folder, tag, model, optimizer, scheduler):
    """Read what save_checkpoint (or ckptkit convert) wrote: (path, client state, steps), or (None, {}, 0)."""
    latest = OS.path.join(folder, "latest")
    if tag is None and OS.path.exists(latest):
        with open(latest) as stream:
            tag = stream.read().strip()
    path = OS.path.join(folder, str(tag)) if tag is not None else folder
    if not OS.path.exists(OS.path.join(path, ".metadata")):
        return None, {}, 0
    weights, moments = GET(model, optimizer)
    DCP.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    SET(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    rest = {"scheduler": None, "steps": 0, "client": {}}
    if OS.path.exists(f"{path}/rest.pt"):
        rest = TORCH.load(f"{path}/rest.pt", weights_only=False)
    if scheduler is not None and rest["scheduler"] is not None:
        scheduler.load_state_dict(rest["scheduler"])
    return path, rest["client"], rest["steps"]'''

HALF = '''def save_16bit_model(model, folder, name="pytorch_model.bin"):
    """Save the whole model in 16 bits from rank 0; all ranks must call it."""
    state = GETMODEL(model, options=OPTIONS(full_state_dict=True, cpu_offload=True))
    if DIST.get_rank() == 0:
        OS.makedirs(folder, exist_ok=True)
        state = {key: value.DTYPE() if value.is_floating_point() else value for key, value in state.items()}
        TORCH.save(state, OS.path.join(folder, name))
    DIST.barrier()
    return True'''


def rewrite(draft: Draft) -> None:
    """Rewrite the three methods."""
    for call, _ in draft.methods("save_checkpoint", "load_checkpoint", "save_16bit_model", sources=SOURCES):
        assert isinstance(call.func, cst.Attribute)
        setup = setup_at(draft, call.func.value)
        if setup is None:
            draft.todo(call, "several engines with different configs may be meant here: save each by hand")
            continue
        code = draft.code(call.func.value)
        method = call.func.attr.value
        if method == "save_checkpoint":
            _save(draft, call, setup, code)
        elif method == "load_checkpoint":
            _load(draft, call, setup, code)
        else:
            _half(draft, call, setup, code)


def _written(draft: Draft, name: str, text: str, dtype: str = "") -> None:
    names = {
        "OS": draft.need_module("os"),
        "TORCH": draft.need_module("torch"),
        "DIST": draft.need_module("torch.distributed", "dist"),
    }
    if "GETMODEL" in text:
        names["GETMODEL"] = draft.need(STATE, "get_model_state_dict")
        names["OPTIONS"] = draft.need(STATE, "StateDictOptions")
    else:
        names["DCP"] = draft.need_module("torch.distributed.checkpoint", "dcp")
        names["GET"] = draft.need(STATE, "get_state_dict")
        if "SET(" in text:
            names["SET"] = draft.need(STATE, "set_state_dict")
    for word, local in names.items():
        for end in (".", "("):
            text = text.replace(f" {word}{end}", f" {local}{end}").replace(f"({word}{end}", f"({local}{end}")
            text = text.replace(f"={word}{end}", f"={local}{end}")
    draft.helpers.setdefault(name, text.replace("DTYPE", dtype))


def _held(setup: Setup, code: str) -> str:
    schedule = setup.at(code, "lr_scheduler") if setup.scheduler else "None"
    return f"{code}, {setup.at(code, 'optimizer')}, {schedule}"


def _save(draft: Draft, call: cst.Call, setup: Setup, code: str) -> None:
    names = ["save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"]
    given = {name: argument_of(call, names, name) for name in names}
    if given["exclude_frozen_parameters"] is not None:
        draft.todo(call, "frozen parameters are saved as well: leave them out of the state by hand")
    folder = given["save_dir"]
    if folder is None:
        return
    _written(draft, "save_checkpoint", SAVE)
    tag, client = (_or_none(draft, given[name]) for name in ("tag", "client_state"))
    steps = setup.at(code, "global_steps")
    quoted = draft.module.quote(folder)
    draft.replace(call, "save_checkpoint(", *quoted, ", ", *tag, f", {_held(setup, code)}, ", *client, f", {steps})")
    draft.note(call, Grade.EXACT, "save_checkpoint writes a torch.distributed.checkpoint folder")


def _load(draft: Draft, call: cst.Call, setup: Setup, code: str) -> None:
    names = ["load_dir", "tag"]
    folder = argument_of(call, names, "load_dir")
    others = [a.keyword.value for a in call.args if a.keyword is not None and a.keyword.value not in names]
    if folder is None:
        return
    if others:
        draft.todo(call, f"load_checkpoint with {', '.join(others)}: load the parts by hand with dcp.load")
        return
    _written(draft, "load_checkpoint", LOAD)
    pieces: Line = (
        "load_checkpoint(",
        *draft.module.quote(folder),
        ", ",
        *_or_none(draft, argument_of(call, names, "tag")),
        f", {_held(setup, code)})",
    )
    statement = draft.module.statement(call)
    steps = setup.at(code, "global_steps")
    draft.note(call, Grade.EXACT, "load_checkpoint reads a torch.distributed.checkpoint folder")
    if isinstance(statement, cst.Expr):
        draft.statement_becomes(statement, [(f"_, _, {steps} = ", *pieces)])
        return
    target = statement.targets[0].target if isinstance(statement, cst.Assign) and statement.value is call else None
    if isinstance(target, cst.Tuple) and len(target.elements) == 2:
        draft.statement_becomes(statement, [(draft.code(target), f", {steps} = ", *pieces)])
    else:
        draft.replace(call, *pieces, "[:2]")
        draft.todo(call, f"the third value of load_checkpoint is the step count: store it in {steps}")


def _or_none(draft: Draft, node: cst.BaseExpression | None) -> Line:
    return ("None",) if node is None else draft.module.quote(node)


def _half(draft: Draft, call: cst.Call, setup: Setup, code: str) -> None:
    names = ["save_dir", "save_filename"]
    folder, name = (argument_of(call, names, one) for one in names)
    if folder is None:
        return
    _written(draft, "save_16bit_model", HALF, "half" if setup.precision == "fp16" else "bfloat16")
    last: Line = () if name is None else (", ", *draft.module.quote(name))
    draft.replace(call, f"save_16bit_model({code}, ", *draft.module.quote(folder), *last, ")")
    draft.note(call, Grade.EXACT, "the whole model is gathered and saved in 16 bits")
