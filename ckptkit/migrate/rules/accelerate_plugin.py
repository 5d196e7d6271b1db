"""accelerate's plugins in code: FullyShardedDataParallelPlugin gets FSDP2's arguments; DeepSpeedPlugin is reported.

What: `fsdp_version=2`, `reshard_after_forward` in the place of the sharding strategy, names of classes in the place of
a policy object, MixedPrecisionPolicy, `cpu_offload=True`, `state_dict_type` spelled out; what FSDP2 does not have goes.

Why: with `fsdp_version=2` accelerate 1.15 ignores the classes inside a policy object, unsaid (it looks only at
`transformer_cls_names_to_wrap` and `min_num_params`; any other policy shards the root alone), saves sharded where
FSDP1 saved a full state dict by default, and raises on the rest.

Before::

    FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP",
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    )

After::

    FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="FULL_STATE_DICT",
    )

In numbers: equal in fp32. buffer_dtype has no counterpart in a mixed precision; sizes of a size-based policy are
counted otherwise (other groups, same numbers). `sync_module_states=True` becomes `cpu_ram_efficient_loading=True`,
which is what broadcasts rank 0's weights under FSDP2; without it every rank must build the same model, as before.

Known limits: NO_SHARD is DDP and HYBRID_SHARD wants a `parallelism_config`: both are left, as are policies of other
kinds. Settings that come from `accelerate launch` or its YAML are migrated there. FSDP2 wants the model and the
optimizer in one `prepare`: where a model goes alone a TODO says so. Read in accelerate 1.15 utils/dataclasses.py and
utils/fsdp_utils.py.
"""

from __future__ import annotations

import libcst as cst

from .. import entries
from ..draft import Draft
from ..entries import Entries
from ..grade import Grade
from ..names import canonical
from ..origin import CALL
from ..syntax import argument_of
from ..trainer_settings import GONE, LOCAL, NO_SHARD, RESHARDS, strategy_of

SOURCES = ("fsdp1", "deepspeed")
_PLUGIN = "FullyShardedDataParallelPlugin"
_FSDP = "torch.distributed.fsdp."
_HOMES = ("accelerate.", "accelerate.utils.", "accelerate.utils.dataclasses.")


def rewrite(draft: Draft) -> None:
    """Rewrite each plugin that is made in the module."""
    found = False
    for call in draft.calls(*(home + _PLUGIN for home in _HOMES)):
        found = _fsdp(draft, call) or found
    for call in draft.calls(*(home + "DeepSpeedPlugin" for home in _HOMES)):
        _deepspeed(draft, call)
    for call in draft.module.every(cst.Call) if found else ():
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value != "prepare" or len(call.args) != 1:
            continue
        makers = {o.name for o in draft.origins(func.value) if o.kind == CALL}
        if makers & {"accelerate.Accelerator", "accelerate.accelerator.Accelerator"} and _is_model(draft, call):
            draft.todo(
                call, "FSDP2 wants the model and its optimizer in one call: accelerator.prepare(model, optimizer)"
            )


def _is_model(draft: Draft, call: cst.Call) -> bool:
    code = draft.code(call.args[0].value).lower()
    return "model" in code or "net" in code


def _fsdp(draft: Draft, call: cst.Call) -> bool:
    arguments = entries.of_call(draft, call)
    if arguments is None or len(arguments.nodes) != len(call.args):
        draft.todo(call, "give the arguments of the plugin by name, without ** and *, and migrate again")
        return False
    version = arguments.value("fsdp_version")
    if version is not None and draft.code(version) == "2":
        return False
    new: dict[str, str] = {"fsdp_version": "2"}
    gone = [name for name in (*GONE, "sharding_strategy", "param_init_fn") if name in arguments.nodes]
    said: list[tuple[Grade, str]] = []
    for part in (_strategy, _policy, _precision, _offload, _state_dict):
        reason = part(draft, arguments, new, gone, said)
        if reason:
            draft.todo(call, reason)
            return False
    sync = arguments.value("sync_module_states")
    if sync is not None and draft.code(sync) == "True":
        new["cpu_ram_efficient_loading"] = "True"  # what broadcasts rank 0's weights under FSDP2
    arguments.drop(gone)
    for name, code in new.items():
        arguments.put(name, code)
    arguments.write()
    draft.note(call, Grade.EXACT, "the plugin asks for FSDP2; every rank must build or load the same weights")
    for grade, message in said:
        draft.note(call, grade, message)
    return True


Said = list[tuple[Grade, str]]


def _strategy(draft: Draft, arguments: Entries, new: dict[str, str], gone: list[str], said: Said) -> str:
    node = arguments.value("sharding_strategy") or arguments.value("reshard_after_forward")
    strategy = "FULL_SHARD"
    if node is not None:
        text = draft.name(node) or draft.code(node).strip("\"'")
        strategy = strategy_of(text)
    if strategy == "NO_SHARD":
        return NO_SHARD
    if strategy.startswith("HYBRID"):
        return "HYBRID_SHARD: give Accelerator a parallelism_config of replicas and shards, and fsdp_version=2 here"
    if strategy not in RESHARDS:
        return f"the strategy {strategy.lower()} is only known at run time: give reshard_after_forward=True or False"
    new["reshard_after_forward"] = str(RESHARDS[strategy])
    return ""


def _policy(draft: Draft, arguments: Entries, new: dict[str, str], gone: list[str], said: Said) -> str:
    node = arguments.value("auto_wrap_policy")
    if node is None or draft.code(node) == "None" or isinstance(node, cst.SimpleString):
        return ""
    made = [origin for origin in draft.origins(node) if isinstance(origin.node, cst.Call)]
    name = canonical(made[0].name) if len(made) == 1 else ""
    call = made[0].node if made else None
    classes: cst.BaseExpression | None = None
    if name == _FSDP + "ModuleWrapPolicy" and isinstance(call, cst.Call):
        classes = argument_of(call, ["module_classes"], "module_classes")
    elif name == "functools.partial" and isinstance(call, cst.Call) and call.args:
        policy = canonical(draft.flow.name(made[0].module, call.args[0].value)).rpartition(".")[2]
        if policy == "transformer_auto_wrap_policy":
            classes = argument_of(call, [], "transformer_layer_cls")
        elif policy == "size_based_auto_wrap_policy":
            least = argument_of(call, [], "min_num_params")
            new["auto_wrap_policy"] = '"size_based_wrap"'
            new["min_num_params"] = made[0].module.code(least) if least is not None else "100_000_000"
            said.append((Grade.PERFORMANCE, "accelerate counts the sizes otherwise under FSDP2: other groups"))
            return ""
    holders = (cst.Set, cst.List, cst.Tuple)
    if not isinstance(classes, holders) or not all(
        isinstance(e.value, (cst.Name, cst.Attribute)) for e in classes.elements
    ):
        return "accelerate takes no policy object with FSDP2: give auto_wrap_policy and transformer_cls_names_to_wrap"
    names = [made[0].module.code(element.value).rpartition(".")[2] for element in classes.elements]
    new["auto_wrap_policy"] = '"transformer_based_wrap"'
    new["transformer_cls_names_to_wrap"] = entries.spelled(names)
    return ""


def _precision(draft: Draft, arguments: Entries, new: dict[str, str], gone: list[str], said: Said) -> str:
    node = arguments.value("mixed_precision_policy")
    if node is None or draft.code(node) == "None" or isinstance(node, cst.SimpleString):
        return ""
    made = [o for o in draft.origins(node) if isinstance(o.node, cst.Call)]
    names = {canonical(o.name).removeprefix(_FSDP) for o in made}
    if len(made) != 1 or not names <= {"MixedPrecision", "MixedPrecisionPolicy"}:
        return (
            "mixed_precision_policy must be a MixedPrecisionPolicy with FSDP2: param_dtype, reduce_dtype, output_dtype"
        )
    # The object itself is rewritten where it is made, by the rule mixed-precision.
    given = [argument.value for argument in made[0].node.args]  # type: ignore[attr-defined]
    if any(draft.flow.name(made[0].module, value) != "torch.float32" for value in given):
        said.append((Grade.NUMERICS, "FSDP2 casts the inputs of every group and leaves buffers in their dtype"))
    return ""


def _offload(draft: Draft, arguments: Entries, new: dict[str, str], gone: list[str], said: Said) -> str:
    node = arguments.value("cpu_offload")
    if node is None or draft.code(node) in ("None", "True", "False"):
        return ""
    made = [
        o.node
        for o in draft.origins(node)
        if isinstance(o.node, cst.Call) and canonical(o.name) == _FSDP + "CPUOffload"
    ]
    if len(made) != 1:
        return "cpu_offload must be True, False or a CPUOffloadPolicy with FSDP2"
    value = argument_of(made[0], ["offload_params"], "offload_params")
    new["cpu_offload"] = draft.code(value) if value is not None else "False"
    return ""


def _state_dict(draft: Draft, arguments: Entries, new: dict[str, str], gone: list[str], said: Said) -> str:
    kind, config = arguments.value("state_dict_type"), arguments.value("state_dict_config")
    text = (draft.name(kind) or draft.code(kind)).upper() if kind is not None else ""
    if "LOCAL" in text:
        return LOCAL
    if kind is None or text == "NONE":
        makers = {canonical(o.name) for o in draft.origins(config)} if config is not None else set()
        sharded = makers == {_FSDP + "ShardedStateDictConfig"}
        new["state_dict_type"] = '"SHARDED_STATE_DICT"' if sharded else '"FULL_STATE_DICT"'
    gone += [name for name in ("state_dict_config", "optim_state_dict_config") if name in arguments.nodes]
    return ""


def _deepspeed(draft: Draft, call: cst.Call) -> None:
    arguments = entries.of_call(draft, call)
    given = {name: draft.code(node.value) for name, node in arguments.nodes.items()} if arguments else {}
    stage = given.get("zero_stage", "2")
    if arguments is None or "hf_ds_config" in given or stage not in ("1", "2", "3"):
        draft.todo(
            call,
            "write a FullyShardedDataParallelPlugin with fsdp_version=2 in the place of this plugin and its config",
        )
        return
    new = [f"fsdp_version=2, reshard_after_forward={stage == '3'}", 'auto_wrap_policy="transformer_based_wrap"']
    if any("cpu" in given.get(f"offload_{part}_device", "") for part in ("optimizer", "param")):
        new.append("cpu_offload=True")
    also = ["Accelerator(fsdp_plugin=...)"]
    if "gradient_accumulation_steps" in given:
        also.append(f"Accelerator(gradient_accumulation_steps={given['gradient_accumulation_steps']})")
    clip = given.get("gradient_clipping", "1.0")
    also.append(f"accelerator.clip_grad_norm_(model.parameters(), {clip}) before each step, which DeepSpeed did itself")
    draft.todo(call, f"write {_PLUGIN}({', '.join(new)}) with {', '.join(also)}")
