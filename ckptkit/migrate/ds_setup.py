"""Fact: what a DeepSpeed engine does, as its config says, and the names under which the migrated program holds the
optimizer, the scheduler and the counters that the engine held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from .draft import Draft
from .ds_config import Said, Tree, Unknown, entry, read_config
from .plan import Line
from .rule import spell
from .syntax import is_store
from .wraps import Value, Wrap

# Methods and attributes of an engine whose counterpart needs the optimizer, the scheduler or a counter.
HELD = frozenset(
    "step backward optimizer lr_scheduler global_steps micro_steps get_lr get_global_grad_norm save_checkpoint "
    "load_checkpoint is_gradient_accumulation_boundary gradient_accumulation_steps gradient_clipping zero_grad "
    "train_batch_size train_micro_batch_size_per_gpu optimizer_name".split()
)

INIT = ("deepspeed.zero.Init", "deepspeed.runtime.zero.Init", "deepspeed.runtime.zero.partition_parameters.Init")
_LOADS = ("from_pretrained", "load_state_dict", "load", "to", "cuda", "item")  # need the values, or memory for them

DEVICE = '''def local_device():
    """The device of this rank, which becomes the current one."""
    if not TORCH.cuda.is_available():
        return TORCH.device("cpu")
    TORCH.cuda.set_device(int(OS.environ.get("LOCAL_RANK", 0)))
    return TORCH.device("cuda", TORCH.cuda.current_device())'''


@dataclass(slots=True)
class Setup:
    """The engine of one wrap. `model` is the text of the engine where it is made; names are texts in the same
    scope.
    """

    tree: Tree
    stage: int
    precision: str  # fp32, bf16 or fp16
    accumulation: Line
    micro: Line | None
    clip: Line | None  # None: no clipping
    model: str
    optimizer: str
    scheduler: str  # empty: none
    local: bool  # all uses can see the names; else they are attributes of the model
    counts: frozenset[str]  # counters that something reads
    stored: dict[str, Line] = field(default_factory=dict)  # values that only the run knows, by name
    client_optimizer: Value | None = None
    client_scheduler: Value | None = None

    @property
    def accumulates(self) -> bool:
        return self.accumulation != ("1",)

    def at(self, code: str, name: str) -> str:
        """How a use of the engine under the text `code` spells one of the names."""
        plain = {"optimizer": self.optimizer, "lr_scheduler": self.scheduler}.get(name, name)
        if not self.local:
            return f"{code}.{name}"
        head, dot, _ = self.model.rpartition(".")
        return f"{head}{dot}{plain}" if dot and "." not in plain else plain

    def value(self, code: str, name: str, line: Line) -> Line:
        """A setting at a use: its constant, or the name that it is stored under."""
        return (self.at(code, name),) if name in self.stored else line


def setup_of(draft: Draft, wrap: Wrap) -> Setup | Unknown:
    """The setup of a wrap, read once. Call it first with the draft of the wrap's own module."""
    if "deepspeed" not in wrap.facts:
        wrap.facts["deepspeed"] = _read(draft, wrap)
    found = wrap.facts["deepspeed"]
    assert isinstance(found, (Setup, Unknown))
    return found


def setup_at(draft: Draft, node: cst.BaseExpression) -> Setup | None:
    """The one setup of the engines that an expression may hold; None where they differ in what a use must know."""
    setups = [s for s in (w.facts.get("deepspeed") for w in draft.wraps_of(node, "deepspeed")) if isinstance(s, Setup)]
    first = setups[0] if setups else None
    for other in setups[1:]:
        assert first is not None
        same = (first.accumulation, first.clip, first.precision, bool(first.scheduler), first.local) == (
            other.accumulation,
            other.clip,
            other.precision,
            bool(other.scheduler),
            other.local,
        )
        if not same or (first.local and first.optimizer != other.optimizer):
            return None
    return first


def partitioned(draft: Draft, wrap: Wrap) -> cst.Call | None:
    """The `zero.Init` of a `with` of its own in which a wrap's model is made by its class alone, if there is one."""
    if "zero.Init" in wrap.facts:
        found = wrap.facts["zero.Init"]
        return found if isinstance(found, cst.Call) else None
    wrap.facts["zero.Init"] = None
    subject, setup = wrap.subject, setup_of(draft, wrap)
    if subject is None or isinstance(setup, Unknown) or entry(setup.tree, "zero_optimization.offload_param"):
        return None
    made = {id(origin.node) for origin in draft.flow.origins(subject.module, subject.node)}
    for peer in draft.peers.values():
        for call in peer.calls(*INIT):
            statement = peer.module.statement(call)
            single = isinstance(statement, cst.With) and len(statement.items) == 1
            if not single or not isinstance(peer.module.parent(call), cst.WithItem):
                continue
            calls = peer.module.inside(statement.body, cst.Call)  # type: ignore[union-attr]
            loads = any(isinstance(c.func, cst.Attribute) and c.func.attr.value in _LOADS for c in calls)
            builds = any({id(o.node) for o in peer.origins(c)} & made for c in calls)
            if builds and not loads and not any(argument.star for argument in call.args):
                wrap.facts["zero.Init"] = call
                return call
    return None


def constant(value: Any) -> bool:
    """Whether a leaf is a JSON value that is known here."""
    return not isinstance(value, (Value, Mapping)) and value != "auto"


def spelled(draft: Draft, wrap: Wrap, leaf: Any) -> Line | None:
    """A leaf as code at the wrapping call; None where it cannot be named there."""
    if isinstance(leaf, Said):
        same = leaf.module is wrap.module and leaf.module.function(leaf.node) is wrap.module.function(wrap.call)
        return (leaf.text,) if same else None
    if isinstance(leaf, Value):
        return spell(draft, wrap, leaf)
    if isinstance(leaf, (list, tuple)):
        leaf = tuple(leaf)
    return (repr(leaf),)


def _read(draft: Draft, wrap: Wrap) -> Setup | Unknown:
    tree = read_config(draft, wrap)
    if isinstance(tree, Unknown):
        return tree
    if auto := _autos(tree):
        return Unknown(f'only transformers\' Trainer fills in "auto": {", ".join(auto)}')
    switches = {
        name: entry(tree, name, False)
        for name in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled", "zero_optimization.stage")
    }
    for name, value in switches.items():
        if not constant(value):
            return Unknown(f"{name} is only known at run time")
    bf16 = switches["bf16.enabled"] or switches["bfloat16.enabled"]
    precision = "bf16" if bf16 else "fp16" if switches["fp16.enabled"] else "fp32"
    accumulation, micro = _batch(draft, wrap, tree)
    clip = spelled(draft, wrap, entry(tree, "gradient_clipping", 1.0))
    if accumulation is None or clip is None:
        return Unknown("the batch sizes or the clipping come from where they cannot be named here")
    model, optimizer, scheduler = _targets(draft, wrap)
    client_optimizer, client_scheduler = wrap.get("optimizer"), wrap.get("lr_scheduler")
    has_scheduler = client_scheduler is not None or entry(tree, "scheduler.type") is not None
    uses = _uses(draft, wrap)
    local = all(
        module is wrap.module and (module.code(node.value) == model or module.code(node.value) == f"{model}.module")
        and (module.function(node) is module.function(wrap.call) or model.startswith("self."))
        for module, node in uses
    )  # fmt: skip
    names = {node.attr.value for _, node in uses}
    setup = Setup(
        tree=tree,
        stage=int(switches["zero_optimization.stage"] or 0),
        precision=precision,
        accumulation=accumulation,
        micro=micro,
        clip=None if clip in (("0",), ("0.0",)) else clip,
        model=model,
        optimizer=optimizer or _name_of(client_optimizer, wrap) or draft.fresh("optimizer"),
        scheduler=(scheduler or _name_of(client_scheduler, wrap) or draft.fresh("scheduler")) if has_scheduler else "",
        local=local,
        counts=frozenset(_counts(names)),
        client_optimizer=client_optimizer,
        client_scheduler=client_scheduler,
    )
    for name, line in (("accumulation_steps", setup.accumulation), ("max_norm", setup.clip)):
        if line is not None and not _is_number(line):
            setup.stored[name] = line
    return setup


def _counts(names: set[str]) -> set[str]:
    found = set()
    if names & {"global_steps", "save_checkpoint", "load_checkpoint"}:
        found.add("global_steps")
    if "get_global_grad_norm" in names:
        found.add("grad_norm")
    return found


def _is_number(line: Line) -> bool:
    return len(line) == 1 and isinstance(line[0], str) and line[0].replace(".", "", 1).replace("e-", "").isdigit()


def _autos(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            found.append(prefix + key)
    return found


def _batch(draft: Draft, wrap: Wrap, tree: Tree) -> tuple[Line | None, Line | None]:
    """(accumulation steps, micro-batch size), from two of three as deepspeed 0.19.8
    `_set_batch_related_parameters`.
    """
    batch, micro = entry(tree, "train_batch_size"), entry(tree, "train_micro_batch_size_per_gpu")
    accumulation = entry(tree, "gradient_accumulation_steps")
    lines = [None if x is None else spelled(draft, wrap, x) for x in (batch, micro, accumulation)]
    if any(x is not None and line is None for x, line in zip((batch, micro, accumulation), lines, strict=True)):
        return None, None
    total, each, steps = lines
    if total is None:
        return steps or ("1",), each
    dist = draft.need_module("torch.distributed", "dist")
    world = f"{dist}.get_world_size()"
    if each is not None:
        return steps or (*_factor(total), " // ", *_factor(each), f" // {world}"), each
    if steps is not None:
        return steps, (*_factor(total), f" // {world} // ", *_factor(steps))
    return ("1",), (*_factor(total), f" // {world}")


def _factor(line: Line) -> Line:
    simple = all(isinstance(p, str) and p.replace("_", "").replace(".", "").isalnum() for p in line)
    return line if simple else ("(", *line, ")")


def _targets(draft: Draft, wrap: Wrap) -> tuple[str, str, str]:
    """The names that the call's four values are unpacked into: engine, optimizer, scheduler; empty where unnamed."""
    module = wrap.module
    statement = module.statement(wrap.call)
    names = ["", "", "", ""]
    if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
        target = statement.targets[0].target
        if isinstance(target, (cst.Tuple, cst.List)):
            for index, element in enumerate(target.elements[:4]):
                if not isinstance(element, cst.Element):
                    break
                code = module.code(element.value)
                names[index] = code if not set(code) <= {"_"} else ""
        elif isinstance(statement.value, cst.Subscript):
            names[0] = module.code(target)
    subject = wrap.subject
    if not names[0] and subject is not None and isinstance(subject.node, (cst.Name, cst.Attribute)):
        names[0] = module.code(subject.node)
    return names[0] or draft.fresh("engine", "model_engine"), names[1], names[3]


def _name_of(value: Value | None, wrap: Wrap) -> str:
    if value is None or value.module is not wrap.module or not isinstance(value.node, (cst.Name, cst.Attribute)):
        return ""
    makers = [value.module.code(c.func) for c in value.module.every(cst.Call)]
    code = value.module.code(value.node)
    return "" if code in makers else code  # a callable that makes the optimizer is not its name


def _uses(draft: Draft, wrap: Wrap) -> list[tuple[Any, cst.Attribute]]:
    found = []
    for peer in draft.peers.values():
        for node in peer.module.every(cst.Attribute):
            if node.attr.value in HELD and not is_store(peer.module, node) and wrap in peer.wraps_of(node.value):
                found.append((peer.module, node))
    return found


def local_device(draft: Draft) -> str:
    """Have the function written into the file; its name."""
    if "local_device" not in draft.helpers:
        torch, os = draft.need_module("torch"), draft.need_module("os")
        draft.helpers["local_device"] = DEVICE.replace("TORCH", torch).replace("OS", os)
    return "local_device"
