"""The check that nothing stays behind unsaid: every use of the old API that the edits leave in place is a finding.

What: after all rules have run, each name of FSDP1, DDP or DeepSpeed that is still in the text gets a `#
TODO(ckptkit): ...` above its statement and a line in the report, graded manual; so do arguments that no rule carries
over, and star imports, whose names cannot be resolved.

Why: a call that was forgotten fails at run time, hours into a job, or silently means something else.

What to do: read the page of the construct's rule (`ckptkit explain`); most leftovers come from a wrap that was left
because an argument is only known at run time, and go with it once it is spelled out. Private parts of FSDP1
(FlatParameter, handles, `_reshard`) and classes derived from it have no counterpart and need another design.

Known limits: wrap policies, ShardingStrategy and StateDictType are plain callables and enums: they may stay.
"""

from __future__ import annotations

import libcst as cst

from .draft import Draft
from .edit import Rendering
from .grade import Grade
from .names import FSDP, OWNERS
from .sharing import taken_by
from .wraps import Wrap

RULE = "leftover"
_ASKED = "torch.distributed.fsdp.MixedPrecision"
# Plain callables and an enum that mean the same beside FSDP2: `shard_by_policy` takes the policies as they are.
_HARMLESS = (
    "ModuleWrapPolicy",
    "CustomPolicy",
    "ShardingStrategy",
    "StateDictType",
    "_module_wrap_policy",
    "_or_policy",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
)


_ONLY_FSDP1 = {
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_(model.parameters(), ...), whose norm needs .full_tensor()",
    "no_sync": "set_requires_gradient_sync(False) before, and True for the last micro-batch",
    "summon_full_params": "gather each parameter with full_tensor()",
}
# Owners that have methods of these names of their own: `accelerator.clip_grad_norm_`, `torch.nn.utils`.
_OTHERS = ("accelerator", "fabric", "utils", "clip", "scaler", "engine", "strategy", "trainer")


def report(draft: Draft, sources: frozenset[str]) -> None:
    """Report every name of an old API that still shows after the edits, with a TODO at its statement."""
    rendering = draft.rendering()
    rendering.whole()
    module = draft.module
    refused = [module.span(w.call) for w in draft.wraps if w.plan.refused]
    kept = any(w.source == "deepspeed" and w.plan.refused for w in draft.all_wraps)
    taken = {id_: w for w in draft.all_wraps if w.plan.refused for id_ in taken_by(draft.flow, w)}
    asked = any("asked" in wrap.facts for wrap in draft.all_wraps)
    asked |= any("def policy_of(" in one.text.masked for one in draft.flow.program)  # of an earlier run
    said: set[tuple[int, str]] = set()
    _methods(draft, rendering)
    for statement in module.every(cst.ImportFrom):
        base = ".".join(_parts(statement.module)) if statement.module and not statement.relative else ""
        star = isinstance(statement.names, cst.ImportStar) and any(OWNERS[s](base + ".X") for s in sources)
        if star and not module.skips(statement):
            draft.todo(statement, f"names of a star import cannot be resolved: import from {base} by name", RULE)
    for node in module.every(cst.Name, cst.Attribute):
        parent = module.parent(node)
        if isinstance(parent, cst.Attribute) and parent.value is node and _owned(draft, parent, sources):
            continue  # the longer name is reported
        if isinstance(parent, cst.Attribute) and parent.attr is node:
            continue
        if isinstance(parent, (cst.ImportAlias, cst.AsName)) or module.up(node, cst.Import, cst.ImportFrom):
            continue
        if isinstance(parent, cst.Param) and parent.default is not node:
            continue
        if isinstance(parent, cst.Arg) and parent.keyword is node:
            continue
        name = _owned(draft, node, sources)
        if not name or not rendering.shows(module.span(node).start) or module.skips(node):
            continue
        if any(span.holds(module.span(node)) for span in refused):
            continue  # said by the refusal
        try:
            key = (id(module.statement(node)), name)
        except LookupError:
            continue
        if key in said or key[0] in draft.left:
            continue  # a rule has already left this statement to a person
        said.add(key)
        short = ".".join(name.split(".")[-2:])
        if name == _ASKED and asked:
            draft.note(node, Grade.EXACT, f"{short} stays, because policy_of asks it", RULE)
            continue
        reason = _kept_by(draft, node, taken)
        if reason:
            draft.note(node, Grade.MANUAL, f"{short} stays, because {reason}", RULE)
            continue
        if kept and OWNERS["deepspeed"](name):
            draft.note(node, Grade.MANUAL, f"{short} stays, because the engine stays", RULE)
            continue
        draft.todo(node, f"{short} has no rule for this use; see ckptkit explain leftover", RULE)


def _methods(draft: Draft, rendering: Rendering) -> None:
    """Report methods that only FSDP1's wrapper has, called on what cannot be followed, in programs that had a wrap."""
    module = draft.module
    if not any(wrap.source == "fsdp1" and not wrap.plan.refused for wrap in draft.all_wraps):
        return
    for call in module.every(cst.Call):
        func = call.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in _ONLY_FSDP1 or module.skips(call):
            continue
        if (func.attr.value == "no_sync" and call.args) or not rendering.shows(module.span(func.attr).start):
            continue  # accelerate's no_sync takes the model
        owner = draft.code(func.value).lower()
        classes = [origin.node for origin in draft.origins(func.value) if isinstance(origin.node, cst.ClassDef)]
        own = any(_defines(one, func) for one in classes)
        unseen = not own and not draft.flow.names(module, func.value)
        if not unseen or any(word in owner for word in _OTHERS) or id(module.statement(call)) in draft.left:
            continue
        if any(peer.module.skips(one) for peer in draft.peers.values() for one in _fsdp1(peer)):
            return  # what cannot be followed may be the model whose wrap was to stay
        draft.todo(call, f"if this is a sharded model: {_ONLY_FSDP1[func.attr.value]}", RULE)


def _fsdp1(draft: Draft) -> list[cst.Call]:
    return [call for call in draft.module.every(cst.Call) if draft.flow.called(draft.module, call) == FSDP]


def _defines(node: cst.ClassDef, func: cst.Attribute) -> bool:
    return any(isinstance(one, cst.FunctionDef) and one.name.value == func.attr.value for one in node.body.body)


def _kept_by(draft: Draft, node: cst.CSTNode, taken: dict[int, Wrap]) -> str:
    """Why a name is no oversight: it makes what a wrap is given that was left to a person."""
    for holder in (node, *draft.module.ancestors(node)):
        if id(holder) in taken:
            wrap = taken[id(holder)]
            line, _ = wrap.module.text.place(wrap.module.span(wrap.call).start)
            return f"the wrap in line {line} of {wrap.module.path.name}, which takes it, stays"
        if isinstance(holder, cst.BaseStatement):
            break
    return ""


def _owned(draft: Draft, node: cst.CSTNode, sources: frozenset[str]) -> str:
    if not isinstance(node, (cst.Name, cst.Attribute)):
        return ""
    for name in sorted(draft.flow.names(draft.module, node)):
        if any(OWNERS[source](name) for source in sources) and not _is_harmless(name):
            return name
    return ""


def _is_harmless(name: str) -> bool:
    parts = name.split(".")
    return name.startswith("torch.distributed.fsdp.") and len(parts) > 3 and parts[3] in _HARMLESS


def _parts(node: cst.BaseExpression | None) -> list[str]:
    if isinstance(node, cst.Attribute):
        return [*_parts(node.value), node.attr.value]
    return [node.value] if isinstance(node, cst.Name) else []
