"""Lightning's FSDPStrategy becomes ModelParallelStrategy; the sharding goes into `configure_model`, or a function.

What: the strategy is made with the sizes of the mesh (`data_parallel_size`, `tensor_parallel_size=1`), and the
LightningModule gets a `configure_model` that shards its blocks and itself. For Fabric the same stands in a function
that is given as `parallelize_fn`.

Why: ModelParallelStrategy is Lightning's way to FSDP2. It shards nothing by itself, and takes all devices of a node for
tensor parallelism unless it is told the sizes. Steps of a LightningModule are called around its `forward`: without
`register_fsdp_forward_method` the parameters of the root are still shards in them.

Before::

    trainer = Trainer(devices=8, strategy=FSDPStrategy(auto_wrap_policy={Block}))

After::

    trainer = Trainer(devices=8, strategy=ModelParallelStrategy(data_parallel_size=8, tensor_parallel_size=1))

    class Net(LightningModule):
        def configure_model(self):
            if isinstance(self, FSDPModule):
                return
            mesh = self.device_mesh["data_parallel"]
            for module in reversed(list(self.modules())[1:]):
                if isinstance(module, Block):
                    fully_shard(module, mesh=mesh)
            fully_shard(self, mesh=mesh)
            for step in ("training_step",):
                register_fsdp_forward_method(self, step)

In numbers: equal, measured against FSDP1 and against Lightning's DDP.

Known limits: left with a TODO are policies that are no set of classes, a precision other than 32, cpu_offload,
mixed_precision, activation_checkpointing_policy, device_mesh, NO_SHARD and HYBRID_SHARD, a module that has a
`configure_model` of its own, and layers that `__init__` makes on the meta device for a later one to fill. Fabric's
`setup(model, optimizer)` must become `setup_module`, then the optimizer, then `setup_optimizers`. Read in Lightning
2.6.6 (fabric and pytorch) strategies/fsdp.py and strategies/model_parallel.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from .. import entries
from ..draft import Draft
from ..edit import Edit, Span
from ..grade import Grade
from ..lightning import Fitted, fitted_by, is_from_lightning, strategies
from ..names import canonical
from ..trainer_settings import NO_SHARD, RESHARDS, strategy_of

SOURCES = ("fsdp1",)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_GONE = {"limit_all_gathers", "use_orig_params", "forward_prefetch", "backward_prefetch"}
_KEPT = {"process_group_backend", "timeout"}
_FSDP = "torch.distributed.fsdp"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the old strategy says: the classes that become groups, the arguments of fully_shard and the new call's."""

    classes: tuple[str, ...] = ()
    reshards: bool = True
    arguments: tuple[str, ...] = ()


def rewrite(draft: Draft) -> None:
    """Rewrite the strategy of each Trainer and Fabric; what no Trainer takes is left to a person."""
    seen: set[int] = set()
    for runner, strategy in strategies(draft):
        if isinstance(strategy, cst.Call):
            seen.add(id(strategy))
        if not draft.module.skips(runner) and not draft.module.skips(strategy):
            _rewrite(draft, runner, strategy)
    for call in draft.module.every(cst.Call):
        name = draft.flow.called(draft.module, call)
        if is_from_lightning(name, "FSDPStrategy") and id(call) not in seen and not draft.module.skips(call):
            draft.todo(call, "make it a ModelParallelStrategy: the Trainer or Fabric that takes it is not in this file")


def _rewrite(draft: Draft, runner: cst.Call, strategy: cst.BaseExpression) -> None:
    wanted = _wanted(draft, runner, strategy)
    size = _size(draft, runner)
    in_fabric = is_from_lightning(draft.flow.called(draft.module, runner), "Fabric")
    fitted: Fitted | str | None = None
    if isinstance(wanted, _Wanted) and not in_fabric:
        fitted = fitted_by(draft, runner, wanted.classes)
    problem = next((one for one in (wanted, size, fitted) if isinstance(one, str) and one.startswith("?")), "")
    if problem or not isinstance(wanted, _Wanted):
        draft.todo(strategy, f"make it a ModelParallelStrategy (ckptkit explain lightning-strategy): {problem[1:]}")
        return
    arguments = [f"data_parallel_size={size}", "tensor_parallel_size=1", *wanted.arguments]
    if isinstance(fitted, Fitted):
        _configure(fitted, wanted)
    else:
        arguments.insert(0, f"parallelize_fn={_function(draft, wanted)}")
        _joint_setup(draft)
    package = _package(draft, runner, "fabric" if in_fabric else "pytorch")
    name = draft.need(package, "ModelParallelStrategy")
    draft.replace(strategy, f"{name}({', '.join(arguments)})")
    draft.note(strategy, Grade.EXACT, "ModelParallelStrategy; the model is sharded where it is configured")


def _package(draft: Draft, runner: cst.Call, part: str) -> str:
    root = draft.flow.called(draft.module, runner).split(".")[0]
    alone = {"pytorch_lightning": "pytorch_lightning.strategies", "lightning_fabric": "lightning_fabric.strategies"}
    return alone.get(root, f"lightning.{part}.strategies")


def _wanted(draft: Draft, runner: cst.Call, strategy: cst.BaseExpression) -> _Wanted | str:
    """What the strategy says, or why it must be left (such a text starts with `?`)."""
    outer = entries.of_call(draft, runner)
    precision = outer.value("precision") if outer else None
    if outer is None:
        return "?the arguments of this call are in **kwargs"
    if precision is not None and draft.code(precision).strip("\"'") not in ("32", "32-true", "None"):
        return f"?precision={draft.code(precision)} needs an mp_policy in each fully_shard, and precision 32-true here"
    if not isinstance(strategy, cst.Call):
        return "?offload needs CPUOffloadPolicy in each fully_shard" if "offload" in draft.code(strategy) else _Wanted()
    given = entries.of_call(draft, strategy)
    if given is None or len(given.nodes) != len(strategy.args):
        return "?the arguments of the strategy are positional or in **kwargs"
    known = _GONE | _KEPT | {"auto_wrap_policy", "sharding_strategy", "state_dict_type", "cpu_offload"}
    if other := sorted(given.nodes.keys() - known):
        return f"?{', '.join(other)} must be said in configure_model"
    offload = given.value("cpu_offload")
    if offload is not None and draft.code(offload) not in ("None", "False"):
        return "?offload needs CPUOffloadPolicy in each fully_shard"
    node = given.value("sharding_strategy")
    kind = strategy_of(draft.name(node) or draft.code(node).strip("\"'")) if node is not None else "FULL_SHARD"
    if kind not in RESHARDS or kind.startswith("HYBRID"):
        return "?" + (NO_SHARD if kind == "NO_SHARD" else f"{kind} needs a mesh of its own")
    classes = _classes(draft, given.value("auto_wrap_policy"))
    if classes is None:
        return "?the policy is no set of classes"
    state = given.value("state_dict_type")
    more = [f"{name}={draft.code(given.nodes[name].value)}" for name in sorted(_KEPT & given.nodes.keys())]
    if state is not None and draft.code(state).strip("\"'") == "full":
        more.insert(0, "save_distributed_checkpoint=False")
    return _Wanted(classes, RESHARDS[kind], tuple(more))


def _classes(draft: Draft, node: cst.BaseExpression | None) -> tuple[str, ...] | None:
    if node is None or draft.code(node) == "None":
        return ()
    origins = list(draft.origins(node))
    made, module = (origins[0].node, origins[0].module) if len(origins) == 1 else (node, draft.module)
    if module is not draft.module:
        return None
    if isinstance(made, cst.Call) and canonical(origins[0].name) == f"{_FSDP}.ModuleWrapPolicy" and made.args:
        made = made.args[0].value
    if not isinstance(made, (cst.Set, cst.List, cst.Tuple)):
        return None
    values = [element.value for element in made.elements]
    return tuple(draft.code(one) for one in values) if all(isinstance(one, cst.Name) for one in values) else None


def _size(draft: Draft, runner: cst.Call) -> str:
    """How many ranks share the model: devices times nodes."""
    given = entries.of_call(draft, runner)
    devices = given.value("devices") if given else None
    nodes = given.value("num_nodes") if given else None
    text = draft.code(devices).strip("\"'") if devices is not None else "auto"
    if isinstance(devices, (cst.List, cst.Tuple)):
        text = str(len(devices.elements))
    elif text in ("auto", "-1", "None"):
        text = f"{draft.need_module('torch')}.cuda.device_count()"
    elif "," in text:
        text = str(len([one for one in text.split(",") if one.strip()]))
    more = draft.code(nodes) if nodes is not None else "1"
    if more == "1":
        return text
    return str(int(text) * int(more)) if text.isdigit() and more.isdigit() else f"{text} * {more}"


def _body(draft: Draft, wanted: _Wanted, model: str, mesh: str) -> list[str]:
    """The lines that shard the blocks, then the model."""
    shard = draft.need(_FSDP, "fully_shard")
    more = "" if wanted.reshards else ", reshard_after_forward=False"
    lines = [f'mesh = {mesh}["data_parallel"]']
    if wanted.classes:
        test = wanted.classes[0] if len(wanted.classes) == 1 else f"({', '.join(wanted.classes)})"
        lines += [
            f"for module in reversed(list({model}.modules())[1:]):",
            f"\tif isinstance(module, {test}):",
            f"\t\t{shard}(module, mesh=mesh{more})",
        ]
    return [*lines, f"{shard}({model}, mesh=mesh{more})"]


def _configure(fitted: Fitted, wanted: _Wanted) -> None:
    draft, owner = fitted.draft, fitted.owner
    steps = [name for name in _STEPS if name in fitted.methods] or ["training_step"]
    sharded, register = draft.need(_FSDP, "FSDPModule"), draft.need(_FSDP, "register_fsdp_forward_method")
    named = ", ".join(map(entries.spelled, steps))
    lines = [
        "def configure_model(self):",
        f"\tif isinstance(self, {sharded}):",
        "\t\treturn  # it is called again by every fit, validate and test",
        *("\t" + line for line in _body(draft, wanted, "self", "self.device_mesh")),
        f"\tfor step in ({named}{',' if len(steps) == 1 else ''}):",
        f"\t\t{register}(self, step)",
    ]
    first = fitted.methods.get("__init__") or owner.body.body[-1]
    _write(draft, draft.module.lines(first).stop, lines, draft.module.indent(first), around=1)
    draft.note(owner, Grade.EXACT, "configure_model shards the model")


def _function(draft: Draft, wanted: _Wanted) -> str:
    name = draft.throwaway("shard_model")
    if name not in draft.helpers:
        body = ["\t" + line for line in _body(draft, wanted, "model", "device_mesh")]
        lines = [f"def {name}(model, device_mesh):", *body, "\treturn model"]
        draft.helpers[name] = "\n".join(lines).replace("\t", draft.module.step()) + "\n"
    return name


def _write(draft: Draft, at: int, lines: list[str], indent: str, *, around: int) -> None:
    newline, step = draft.module.text.newline, draft.module.step()
    text = newline.join(indent + line.replace("\t", step) for line in lines)
    lead = newline if at and draft.module.text.content[at - 1] not in "\r\n" else ""
    draft.edits.append(Edit(Span(at, at), (lead + newline * around + text + newline,), before=False))


def _joint_setup(draft: Draft) -> None:
    for call in draft.module.every(cst.Call):
        is_setup = isinstance(call.func, cst.Attribute) and call.func.attr.value == "setup" and len(call.args) > 1
        if is_setup and any(is_from_lightning(o.name, "Fabric") for o in draft.origins(call.func.value)):  # type: ignore[attr-defined]
            draft.todo(call, "setup_module(model) first, then make the optimizer, then setup_optimizers(optimizer)")
