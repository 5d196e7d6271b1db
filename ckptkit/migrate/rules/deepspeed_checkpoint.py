"""save_checkpoint, load_checkpoint and save_16bit_model of an engine become functions on torch.distributed.checkpoint.

What: two functions are written into the file: `save_checkpoint` writes model, optimizer, scheduler, counters and client
state as one DCP folder under the tag, and the tag into `latest`; `load_checkpoint` reads them and answers the path, the
client state and the number of updates. `save_16bit_model` gathers the whole model and saves it in bf16 (or fp16).

Why: the engine wrote its partitions, which only it reads.

Before::

    engine.save_checkpoint(folder, client_state={"epoch": epoch})
    _, state = engine.load_checkpoint(folder)

After::

    save_checkpoint(folder, None, engine, optimizer, scheduler, {"epoch": epoch}, global_steps)
    _, state, global_steps = load_checkpoint(folder, None, engine, optimizer, scheduler)

Checkpoints of the original program: the report prints the `ckptkit convert` line that makes `<folder>.fsdp2` of a
folder of DeepSpeed's (`<folder>/<tag>.fsdp2` where the script names a tag). `load_checkpoint` looks there by itself, so
that nothing in the script or its arguments changes; where that folder is missing it raises with the line to run, and
never starts from nothing. Weights (the fp32 masters), moments, schedule, loss scale, client state and the number of
updates go on where they stopped.

In numbers: equal.

Known limits: the client state is rank 0's, as DeepSpeed loads it at stages 0 to 2. `custom_load_fn` and
`exclude_frozen_parameters` are left with a TODO. Where nothing is found `(None, None)` is answered, as before.
"""

from __future__ import annotations

import re

import libcst as cst

from ..draft import Draft
from ..ds_setup import Setup, setup_at
from ..grade import Grade
from ..plan import Line
from ..state import STATE
from ..syntax import argument_of

SOURCES = ("deepspeed",)

SAVE = '''def save_checkpoint(folder, tag, model, optimizer, scheduler, client, global_steps, latest=True, scaler=None):
    """Write the state of the training as a checkpoint folder under its tag, and the tag into `latest`."""
    tag = str(tag) if tag is not None else f"global_step{global_steps}"
    weights, moments = GET(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": global_steps, "client_state": client or {}}
    for name, one in (("scheduler", scheduler), ("scaler", scaler)):
        if one is not None:
            state[name] = one.state_dict()
    planner = DCP.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # what differs by rank is rank 0's
    DCP.save(state, checkpoint_id=OS.path.join(folder, tag), planner=planner)
    if DIST.get_rank() == 0 and latest:
        with open(OS.path.join(folder, "latest"), "w") as stream:
            stream.write(tag)
    DIST.barrier()
    return True'''

FOUND = '''def find_checkpoint(folder, tag):
    """The folder that holds a checkpoint, of DeepSpeed's what ckptkit convert made of it; None where there is none."""
    wanted, latest = folder if tag is None else OS.path.join(folder, str(tag)), OS.path.join(folder, "latest")
    if tag is None and OS.path.exists(latest):
        with open(latest) as stream:
            tag = stream.read().strip()
    path = folder if tag is None else OS.path.join(folder, str(tag))
    if GLOB.glob(OS.path.join(path, "*model_states.pt")):
        path = f"{OS.path.normpath(wanted)}.fsdp2"
        if not OS.path.exists(path):
            raise FileNotFoundError(f"{wanted} is DeepSpeed's; run: ckptkit convert {wanted} {path} --to dcp")
    return path if OS.path.exists(OS.path.join(path, ".metadata")) else None'''

NESTED = '''def nested(flat, paths):
    """The tree of dicts and lists for which a checkpoint keeps flat names."""
    tree = {}
    for name, value in flat.items():
        *keys, last = paths[name]
        at = tree
        for key in keys:
            at = at.setdefault(key, {})
        at[last] = value

    def listed(value):
        if not isinstance(value, dict):
            return value
        if value and all(isinstance(key, int) for key in value):  # the places of a list
            return [listed(value[key]) for key in sorted(value)]
        return {key: listed(one) for key, one in value.items()}

    return listed(tree)'''

LOAD = '''def load_checkpoint(folder, tag, model, optimizer, scheduler, scaler=None, strict=True):
    """Read what save_checkpoint or ckptkit convert wrote: (path, client state, updates), or (None, None, 0)."""
    path = find_checkpoint(folder, tag)
    if path is None:
        return None, None, 0
    metadata = DCP.FileSystemReader(path).read_metadata()
    held = metadata.state_dict_metadata
    weights, moments = GET(model, optimizer if optimizer is not None else ())
    groups = moments.get("param_groups", [])
    if optimizer is None:
        moments = {}
    else:  # options that the optimizer of the checkpoint did not have stay as they are
        moments["param_groups"] = [
            {key: value for key, value in group.items() if f"optimizer.param_groups.{number}.{key}" in held}
            for number, group in enumerate(groups)
        ]
    if not strict:
        weights = {name: value for name, value in weights.items() if f"model.{name}" in held}
    others = [name for name, keys in metadata.planner_data.items() if keys[0] not in ("model", "optimizer", "master")]
    state = {"model": weights, "optimizer": moments}
    for name in others:
        size = getattr(held[name], "size", None)
        state[name] = None if size is None else TORCH.empty(size, dtype=held[name].properties.dtype)
    DCP.load(state, checkpoint_id=path)
    if optimizer is None:
        SETMODEL(model, weights, options=OPTIONS(strict=strict))
    else:
        moments["param_groups"] = [{**group, **old} for group, old in zip(groups, moments["param_groups"])]
        options = OPTIONS(strict=strict)
        SET(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    rest = nested({name: state[name] for name in others}, metadata.planner_data)
    schedule, scale = rest.pop("scheduler", None), rest.pop("scaler", None)
    if scheduler is not None and schedule:
        if "last_batch_iteration" in schedule:  # DeepSpeed's schedulers count from -1
            rates = [group["lr"] for group in optimizer.param_groups]
            schedule = {"last_epoch": schedule["last_batch_iteration"] + 1, "_last_lr": rates}
        scheduler.load_state_dict({**scheduler.state_dict(), **schedule})
    if scaler is not None and scale:
        scaler.load_state_dict({**scaler.state_dict(), **scale})
    client_state = rest.pop("client_state", {})
    return path, {**rest, **client_state}, rest.get("step", 0)'''

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
    needed = {
        "OS": lambda: draft.need_module("os"),
        "GLOB": lambda: draft.need_module("glob"),
        "TORCH": lambda: draft.need_module("torch"),
        "DIST": lambda: draft.need_module("torch.distributed", "dist"),
        "DCP": lambda: draft.need_module("torch.distributed.checkpoint", "dcp"),
        "GET": lambda: draft.need(STATE, "get_state_dict"),
        "SET": lambda: draft.need(STATE, "set_state_dict"),
        "GETMODEL": lambda: draft.need(STATE, "get_model_state_dict"),
        "SETMODEL": lambda: draft.need(STATE, "set_model_state_dict"),
        "OPTIONS": lambda: draft.need(STATE, "StateDictOptions"),
        "DTYPE": lambda: dtype,
    }
    words = re.compile(rf"\b({'|'.join(needed)})\b")
    draft.helpers.setdefault(name, words.sub(lambda found: needed[found.group()](), text))


def _held(setup: Setup, code: str) -> str:
    schedule = setup.at(code, "lr_scheduler") if setup.scheduler else "None"
    return f"{code}, {setup.at(code, 'optimizer')}, {schedule}"


def _save(draft: Draft, call: cst.Call, setup: Setup, code: str) -> None:
    names = ["save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"]
    given = {name: argument_of(call, names, name) for name in names}
    frozen = given["exclude_frozen_parameters"]
    if frozen is not None and draft.code(frozen) != "False":
        draft.todo(call, "frozen parameters are saved as well: leave them out of the state by hand")
    folder = given["save_dir"]
    if folder is None:
        return
    _written(draft, "save_checkpoint", SAVE)
    tag, client = (_or_none(draft, given[name]) for name in ("tag", "client_state"))
    steps = setup.at(code, "global_steps")
    latest: Line = () if given["save_latest"] is None else (", latest=", *draft.module.quote(given["save_latest"]))
    quoted = draft.module.quote(folder)
    last = f"{_scaler(setup, code)})"
    pieces: Line = (", ", *tag, f", {_held(setup, code)}, ", *client, f", {steps}", *latest, last)
    draft.replace(call, "save_checkpoint(", *quoted, *pieces)
    draft.note(call, Grade.EXACT, "save_checkpoint writes a torch.distributed.checkpoint folder")


_LOAD = ["load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states"]
_LOAD += ["load_module_only", "custom_load_fn"]


def _load(draft: Draft, call: cst.Call, setup: Setup, code: str) -> None:
    given = {name: argument_of(call, _LOAD, name) for name in _LOAD}
    folder = given["load_dir"]
    texts = {name: draft.code(node) for name, node in given.items() if node is not None}
    switches = ("load_optimizer_states", "load_lr_scheduler_states", "load_module_only")
    open_ = [name for name in switches if texts.get(name, "True") not in ("True", "False")]
    if texts.get("custom_load_fn", "None") != "None":
        open_.append("custom_load_fn")
    if folder is None or any(argument.star for argument in call.args):
        draft.todo(call, "load_checkpoint with unpacked arguments: name them")
        return
    if open_:
        draft.todo(call, f"load_checkpoint with {', '.join(open_)}: load the parts by hand with dcp.load")
        return
    for name, text in (("find_checkpoint", FOUND), ("nested", NESTED), ("load_checkpoint", LOAD)):
        _written(draft, name, text)
    only = texts.get("load_module_only") == "True"
    moments = not only and texts.get("load_optimizer_states") != "False"
    schedule = setup.scheduler and moments and texts.get("load_lr_scheduler_states") != "False"
    pieces: Line = (
        "load_checkpoint(",
        *draft.module.quote(folder),
        ", ",
        *_or_none(draft, given["tag"]),
        f", {code}, {setup.at(code, 'optimizer') if moments else 'None'}, "
        f"{setup.at(code, 'lr_scheduler') if schedule else 'None'}{_scaler(setup, code) if moments else ''}",
        *((", strict=", *draft.module.quote(given["load_module_strict"])) if given["load_module_strict"] else ()),
        ")",
    )
    draft.note(call, Grade.EXACT, "load_checkpoint reads a torch.distributed.checkpoint folder")
    statement = draft.module.statement(call)
    steps = "_" if only else setup.at(code, "global_steps")
    targets = _stored(draft, statement, call)
    if targets is not None:
        draft.statement_becomes(statement, [(f"{targets}{steps} = ", *pieces)])
    else:
        draft.replace(call, *pieces, "[:2]")
        draft.todo(call, f"the third value of load_checkpoint is the number of updates: store it in {steps}")


def _stored(draft: Draft, statement: cst.CSTNode, call: cst.Call) -> str | None:
    """Where the path and the client state go, as targets before a further one; None where that cannot be said."""
    if isinstance(statement, cst.Expr):
        return "_, _, "
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0].target, statement.value
    if value is call:
        two = isinstance(target, (cst.Tuple, cst.List)) and len(target.elements) == 2
        return f"{', '.join(draft.code(e.value) for e in target.elements)}, " if two else f"*{draft.code(target)}, "  # type: ignore[attr-defined]
    if isinstance(value, cst.Subscript) and value.value is call:
        index = draft.code(value.slice[0].slice)
        return {"0": f"{draft.code(target)}, _, ", "1": f"_, {draft.code(target)}, "}.get(index)
    return None


def _scaler(setup: Setup, code: str) -> str:
    return f", scaler={setup.at(code, 'scaler')}" if setup.precision == "fp16" else ""


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
