"""transformers' TrainingArguments: FSDP1 settings become FSDP2's, in the call and in the dict that it is given.

What: `fsdp_config` gets `"version": 2` and `reshard_after_forward`, and loses what FSDP2 does not have
(`use_orig_params`, `sync_module_states`, the prefetching). `fsdp` stays a list of words. A `deepspeed=` argument
becomes FSDP2 settings of the same stage where its config, a dict or a JSON file of the tree, says nothing else.

Why: before transformers 5 the Trainer takes FSDP1 unless it is told otherwise; from 5 on a config with FSDP1's strategy
names raises, and FSDP1 itself is to go.

Before::

    TrainingArguments("out", fsdp="shard_grad_op auto_wrap", fsdp_config={"use_orig_params": True})

After::

    TrainingArguments(
        "out",
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "reshard_after_forward": False, "cpu_ram_efficient_loading": True},
    )

In numbers: equal in fp32. With `bf16=True` the output of the model is cast as well (accelerate 1.15
`set_mixed_precision`). FSDP1 broadcast rank 0's weights unless `sync_module_states` was false; under FSDP2
`cpu_ram_efficient_loading` does, which is therefore set.

Known limits: no_shard and hybrid_shard are refused (the first is DDP, the second wants a `parallelism_config`), so is
LOCAL_STATE_DICT. A value that is only known at run time gets a TODO, and so does a default in a class of your own that
derives from TrainingArguments. An `fsdp_config` in a JSON file is migrated with the file (`ckptkit explain
trainer-json`). A DeepSpeed config with an optimizer, a scheduler or a clipping of its own is left: these are then
TrainingArguments' `optim`, `lr_scheduler_type` and `max_grad_norm`.
"""

from __future__ import annotations

import ast
from typing import Any

import libcst as cst

from .. import entries
from ..draft import Draft
from ..ds_config import Unknown, config_of
from ..entries import Entries
from ..grade import Grade
from ..trainer_settings import LOADING, is_fsdp2, message_of, to_fsdp2
from ..wraps import Value

SOURCES = ("fsdp1", "deepspeed")
_LIBRARIES = ("transformers.", "trl.")
_NAMES = {"fsdp", "fsdp_config", "deepspeed"}
# Keys of a DeepSpeed config that need nothing under FSDP2, or that are read here.
_KNOWN = {
    "zero_optimization",
    "bf16",
    "fp16",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "optimizer",
    "scheduler",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}


def rewrite(draft: Draft) -> None:
    """Rewrite each call of TrainingArguments, and of the classes derived from it in transformers and trl."""
    for call in draft.module.every(cst.Call):
        name = draft.flow.called(draft.module, call)
        named = name.startswith(_LIBRARIES) and name.endswith(("TrainingArguments", "Config"))
        if not named or draft.module.skips(call):
            continue
        arguments = _arguments(draft, call)
        if arguments is None:
            draft.todo(call, "the FSDP settings may be in **kwargs: give them to the call by name and migrate again")
        elif _given(arguments, "deepspeed"):
            _deepspeed(draft, call, arguments)
        elif _given(arguments, "fsdp"):
            _fsdp(draft, call, arguments)
    for owner in draft.module.every(cst.ClassDef):
        bases = {draft.flow.name(draft.module, base.value) for base in owner.bases}
        if any(one.startswith(_LIBRARIES) and one.endswith("TrainingArguments") for one in bases):
            _defaults(draft, owner)


def _arguments(draft: Draft, call: cst.Call) -> Entries | None:
    """What holds the FSDP settings: the call, or the dict that it is given as `**kwargs`; None where it may be either.

    Where nothing speaks of FSDP the entries of the call are the answer: they hold nothing of ours.
    """
    holders = [entries.by_name(draft, call)]
    for argument in call.args:
        if argument.star != "**":
            continue
        origins = list(draft.origins(argument.value))
        made = origins[0].node if len(origins) == 1 and origins[0].module is draft.module else None
        inner = entries.of_dict(draft, made) if isinstance(made, cst.Dict) else None
        if inner is None:
            return None if _NAMES & holders[0].nodes.keys() else holders[0]
        holders.append(inner)
    speaking = [one for one in holders if _NAMES & one.nodes.keys()]
    return None if len(speaking) > 1 else (speaking or holders)[0]


def _defaults(draft: Draft, owner: cst.ClassDef) -> None:
    """Defaults in a class of the user's own are for a person: other values come from the command line."""
    for line in owner.body.body:
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if not isinstance(small, (cst.AnnAssign, cst.Assign)) or small.value is None or draft.module.skips(small):
                continue
            target = small.target if isinstance(small, cst.AnnAssign) else small.targets[0].target
            name, code = draft.code(target), draft.code(small.value)
            if name in ("fsdp", "deepspeed") and any(mark in code for mark in ("shard", ".json", "zero")):
                settings = '{"version": 2, "reshard_after_forward": ...}'
                draft.todo(small, f"a default of {name}: give fsdp_config a default with {settings} beside fsdp")


def _given(arguments: Entries, name: str) -> bool:
    value = arguments.value(name)
    return value is not None and arguments.draft.code(value) not in ("None", '""', "''", "False", "[]")


def _fsdp(draft: Draft, call: cst.Call, arguments: Entries) -> None:
    words = _words(draft, arguments.value("fsdp"))
    node = arguments.value("fsdp_config")
    holder, config = (None, {}) if node is None else _config(draft, node)
    if isinstance(config, dict) and is_fsdp2(config):
        return
    if words is None or config is None:
        which = "fsdp" if words is None else "fsdp_config"
        message = f'{which} is only known at run time: it must say "version": 2 and "reshard_after_forward"'
        draft.todo(call, f"{message} (true for full_shard, false for shard_grad_op)")
        return
    if isinstance(config, str):
        draft.note(call, Grade.EXACT, f"the settings are in {config}, which is migrated if it is of this run")
        return
    found = to_fsdp2(words, config)
    if isinstance(found, str):
        draft.todo(call, found)
        return
    given = arguments.value("fsdp")
    assert given is not None
    if draft.code(given) != "True" and found.fsdp != words:
        arguments.put("fsdp", entries.spelled(found.fsdp))
    if holder is None:
        arguments.put("fsdp_config", entries.spelled(found.put))
    else:
        holder.drop(found.drop)
        for key, value in found.put.items():
            holder.put(key, entries.spelled(value))
        holder.write()
    arguments.write()
    low = next((name for name in ("bf16", "fp16") if _given(arguments, name)), "")
    message = message_of(found)
    if low:
        message += f"; with {low} the output is cast and buffers are not, the other way round than in FSDP1"
    draft.note(call, Grade.NUMERICS if low else Grade.EXACT, message)
    for one in found.performance:
        draft.note(call, Grade.PERFORMANCE, f"{one}: has no counterpart")


def _words(draft: Draft, node: cst.BaseExpression | None) -> str | None:
    """The words of `fsdp`, in a string or a list of strings; None where they are not in the text."""
    if node is None:
        return None
    origins = list(draft.origins(node))
    if len(origins) == 1 and draft.flow.is_fixed(draft.module, node):
        node, module = origins[0].node, origins[0].module  # type: ignore[assignment]
    else:
        module = draft.module
    try:
        value = ast.literal_eval(module.code(node))
    except (ValueError, SyntaxError):
        return None
    if value is True:
        return "full_shard auto_wrap"
    if isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value):
        return " ".join(value)
    return value if isinstance(value, str) else None


def _config(draft: Draft, node: cst.BaseExpression) -> tuple[Entries | None, dict[str, Any] | str | None]:
    """The dict that `fsdp_config` is, with its plain values; a path as text; (None, None) where it is not in the text.

    A dict of another module is not edited from here.
    """
    origins = list(draft.origins(node))
    if len(origins) != 1 or origins[0].module is not draft.module:
        return None, None
    made = origins[0].node
    if isinstance(made, cst.SimpleString):
        return None, str(made.evaluated_value)
    holder = entries.of_dict(draft, made) if isinstance(made, cst.Dict) else None
    if holder is None:
        return None, None
    return holder, {key: _plain(draft.code(one.value)) for key, one in holder.nodes.items()}


def _plain(code: str) -> Any:
    try:
        return ast.literal_eval(code)
    except (ValueError, SyntaxError):
        return code


def _deepspeed(draft: Draft, call: cst.Call, arguments: Entries) -> None:
    node = arguments.value("deepspeed")
    assert node is not None
    config = config_of(draft, Value(draft.module, node))
    if isinstance(config, Unknown):
        code = '{"version": 2, "reshard_after_forward": <true for stage 3>}'
        draft.todo(call, f"{config.reason}; write fsdp and fsdp_config={code} in the place of deepspeed")
        return
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3):
        draft.todo(call, f"ZeRO stage {stage} is DDP: leave deepspeed out")
        return
    # DeepSpeed broadcasts rank 0's weights when it starts.
    settings: dict[str, Any] = {"version": 2, "reshard_after_forward": stage == 3, LOADING: True}
    devices = {str((zero.get(f"offload_{part}") or {}).get("device", "none")) for part in ("optimizer", "param")}
    if "nvme" in devices:
        draft.todo(call, "offload to nvme has no counterpart")
        return
    if "cpu" in devices:
        settings["cpu_offload"] = True
    other = _other(config, arguments)
    new = {"fsdp": "full_shard auto_wrap", "fsdp_config": settings}
    if other:
        code = ", ".join(f"{name}={entries.spelled(value)}" for name, value in new.items())
        draft.todo(call, f"write {code} in the place of deepspeed, and {', '.join(other)}")
        return
    arguments.drop(["deepspeed"])
    for name, value in new.items():
        arguments.put(name, entries.spelled(value))
    arguments.write()
    low = [name for name in ("bf16", "fp16") if str((config.get(name) or {}).get("enabled", False)) != "False"]
    message = f"ZeRO stage {stage} becomes FSDP2"
    if low:
        message += f"; with {low[0]} DeepSpeed starts from rounded weights and accumulates gradients in it"
    draft.note(call, Grade.NUMERICS if low else Grade.EXACT, message)


def _other(config: dict[str, Any], arguments: Entries) -> list[str]:
    """What the config says beside the sharding, as arguments that a person must choose."""
    found = []
    for name, argument in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type and warmup_steps")):
        if isinstance(config.get(name), dict):
            found.append(f"{argument} for the {name} {config[name].get('type', '')}".rstrip())
    clip = config.get("gradient_clipping", 1.0)  # DeepSpeed 0.19.8 clips at 1.0 unless it is told otherwise
    norm = arguments.value("max_grad_norm")
    if clip != "auto" and str(clip) != (arguments.draft.code(norm) if norm is not None else "1.0"):
        found.append(f"max_grad_norm={clip}")
    steps = config.get("gradient_accumulation_steps", "auto")
    if steps not in ("auto", 1):
        found.append(f"gradient_accumulation_steps={steps}")
    unknown = config.keys() - _KNOWN
    if unknown:
        found.append(f"see to what {', '.join(sorted(unknown))} did")
    return found
