"""The contract of a migration rule, and the folder of rules as the registry.

How to write a rule =================== One rule is one file in `ckptkit/migrate/rules/`. The file name, with dashes,
is the rule's name (`mixed_precision.py` is `mixed-precision`). Its module docstring is the page that `ckptkit
explain` prints: what it rewrites, why, before, after, what differs in numbers, known limits. The folder is listed;
there is nothing to register. A rule defines::

    SOURCES = ("fsdp1",)                      # of "fsdp1", "ddp", "deepspeed": when it runs

    def plan(draft, wrap): ...                # optional; called once for every wrapping call of its sources
    def complete(draft, wrap): ...            # optional; called for a wrap when every rule has planned it
    def rewrite(draft): ...                   # optional; called once for every module, after all plans of all modules

How rules share facts
=====================
Facts are the engine's, and rules ask for them; no rule calls another.

- `draft.origins(expr)` says where a value was made, across variables, `self.x`, parameters, returns and modules of the
  run (`flow.py`); `draft.name(expr)` is the API that an expression names (`torch.optim.AdamW`), through every alias.
- a `Wrap` (`wraps.py`) is one call of FSDP / DDP / deepspeed.initialize with its arguments by name, `partial`s and
  `**dict`s merged. `draft.wraps_of(expr)` are the wraps whose model an expression may hold; `draft.methods("no_sync")`
  finds method calls on wrapped models.
- `wrap.plan` (`plan.py`) is what will be emitted for that model. In `plan()` a rule takes its arguments with
  `wrap.get(name)` (which claims them: what nobody claims is reported as left over) and adds to the plan: `kwargs`,
  `child_kwargs`, `root_kwargs` of the `fully_shard` calls, `units` (which submodules get a group),
  `step(Order.X, lines)` (statements before or after), or `refuse(rule, reason)`, which leaves the wrap and all uses of
  its model to a person.
  `spell(draft, wrap, value)` gives the pieces that repeat an argument at the wrapping call.
- in `rewrite()` the plans are final. A rule edits uses with `draft.replace / before / after / delete / move_after`,
  imports with `draft.need(module, name)` (which answers the local name), and reports each edit with
  `draft.note(node, grade, message)`, or `draft.todo(node, message)` for what a person must do.

Text and edits ============== Edits are spans of the original text (`edit.py`). A replacement is a list of pieces,
each a string or a `Span`; a `Span` quotes original text *with the edits inside it*, so rules that touch nested
expressions need not know of each other: `draft.replace(call, "fully_shard(", *module.quote(model), ")")`. Everything
outside edits stays byte for byte. `"\\n"` in a string becomes the file's newline and the indentation of the place.

Order of what is emitted ======================== Statements for one model come out in the order of `plan.Order`
(DEVICE, BUILD, BROADCAST, PARALLEL, CHECKPOINTING, COMPILE, PREPARE, SHARD, INIT, LOAD, OPTIMIZER, SCHEDULER); steps
of one order in the order in which rules (by file name) added them. Insertions at one place sort by their `order`.
`rewrite()`s run by file name; the engine writes the wraps themselves after them (`shard.py`), then reports leftovers,
deletes dead assignments and mends the imports. A rule must not act on what its own output looks like: a second run
changes nothing.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import libcst as cst
from libcst import metadata

from ..errors import UsageError
from . import configs
from . import rules as rules_folder
from .draft import Draft
from .module import Module
from .plan import Line
from .wraps import Value, Wrap

SOURCES = ("fsdp1", "ddp", "deepspeed")


@dataclass(frozen=True, slots=True)
class Rule:
    """One file of the rules folder."""

    name: str
    page: str
    sources: tuple[str, ...]
    plan: Callable[[Draft, Wrap], None] | None
    complete: Callable[[Draft, Wrap], None] | None
    rewrite: Callable[[Draft], None] | None

    @property
    def summary(self) -> str:
        """The first line of the page."""
        return self.page.strip().splitlines()[0]


@cache
def rules() -> tuple[Rule, ...]:
    """All rules of code and of configuration files, by name."""
    found = []
    for entry in sorted(pkgutil.iter_modules(rules_folder.__path__), key=lambda one: one.name):
        module = importlib.import_module(f"{rules_folder.__name__}.{entry.name}")
        found.append(
            Rule(
                name=entry.name.replace("_", "-"),
                page=module.__doc__ or "",
                sources=tuple(module.SOURCES),
                plan=getattr(module, "plan", None),
                complete=getattr(module, "complete", None),
                rewrite=getattr(module, "rewrite", None),
            )
        )
    for one in configs.converters():
        found.append(Rule(one.name, one.page, one.sources, None, None, None))
    return tuple(sorted(found, key=lambda rule: rule.name))


def chosen(select: tuple[str, ...], ignore: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules that `--select` and `--ignore` leave. Raises UsageError on a name that is none."""
    known = {rule.name for rule in rules()}
    unknown = [name for name in (*select, *ignore) if name not in known]
    if unknown:
        near = [one for name in unknown for one in difflib.get_close_matches(name.replace("_", "-"), known, n=1)]
        raise UsageError(
            f"no rule of the name {', '.join(map(repr, unknown))}",
            why="--select and --ignore take rule names",
            hint=f"did you mean {' or '.join(near)}?" if near else "ckptkit migrate --list-rules",
        )
    return tuple(rule for rule in rules() if (not select or rule.name in select) and rule.name not in ignore)


def spell(draft: Draft, wrap: Wrap, value: Value) -> Line | None:
    """Pieces that repeat an argument at the wrapping call, or None where it would mean something else there.

    In the wrap's own module the expression is quoted if each of its names has the same bindings at the call. An
    expression of another module can be repeated only if all its names are imported APIs.
    """
    if value.module is wrap.module:
        if spell_at(wrap.module, wrap.call, value.node):
            return draft.module.quote(value.node)
        return None
    pieces: list[str] = []
    code = value.module.code(value.node)
    if isinstance(value.node, (cst.Integer, cst.Float, cst.SimpleString)) or code in ("True", "False", "None"):
        return (code,)
    name = draft.flow.name(value.module, value.node)
    if name.startswith("torch.") and name.count(".") == 1:
        pieces = [draft.need_module("torch"), ".", name.split(".")[1]]
        return ("".join(pieces),)
    return None


def spell_at(module: Module, place: cst.CSTNode, value: cst.CSTNode) -> bool:
    """Whether an expression of a module can be repeated at a place in it: each of its names has the same bindings."""
    return module.within(value, place) or _same_names(module, place, value)


def _same_names(module: Module, place: cst.CSTNode, value: cst.CSTNode) -> bool:
    here = module.scope(place)
    there = module.scope(value)
    if here is None or there is None:
        return False
    stack: list[cst.CSTNode] = [value]
    while stack:
        node = stack.pop()
        if (
            isinstance(node, (cst.Lambda, cst.GeneratorExp, cst.ListComp, cst.SetComp, cst.DictComp))
            and here is not there
        ):
            return False
        if isinstance(node, cst.Name):
            mine = {a for a in here[node.value] if isinstance(a, metadata.BaseAssignment)}
            if mine != set(there[node.value]):
                return False
        children = node.children
        if isinstance(node, (cst.Attribute, cst.Arg)):
            children = [node.value]
        stack.extend(children)
    return True
