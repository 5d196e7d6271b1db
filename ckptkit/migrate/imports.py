"""Mends the imports of a module after its edits: takes out what nothing uses any more and adds what edits need."""

from __future__ import annotations

import re
import sys

import libcst as cst
from libcst import metadata
from libcst.helpers import get_full_name_for_node

from .draft import Draft
from .edit import Edit, Rendering, Span
from .module import Module
from .sweep import exported, fill_blocks

_KEPT = re.compile(r"#\s*noqa:[^#\n]*\bF401\b")  # imported for others to take it from here


def mend(draft: Draft) -> None:
    """Remove dead imports and add needed ones."""
    if not draft.edits:
        return
    rendering = draft.rendering()
    rendering.whole()
    module = draft.module
    wanted: dict[str, list[tuple[str, str]]] = {}
    for (base, name), local in draft.needs.items():
        if not _is_bound(module, base, name, local, rendering):
            wanted.setdefault(base if name else "", []).append((name or base, local))
    plain = wanted.pop("", [])
    emptied: list[cst.ImportFrom] = []
    for statement in module.every(cst.ImportFrom):
        if isinstance(statement.names, cst.ImportStar) or module.skips(statement):
            continue
        dead = [alias for alias in statement.names if _is_dead(draft, statement, alias, rendering)]
        base = (get_full_name_for_node(statement.module) if statement.module and not statement.relative else "") or ""
        at_top = module.function(statement) is None and module.up(statement, cst.ClassDef) is None
        new = wanted.pop(base, []) if base and at_top and not _inside_block(module, statement) else []
        if len(dead) == len(statement.names) and not new:
            emptied.append(statement)
        elif dead or new:
            _change(draft, statement, dead, [_spelled(name, local) for name, local in new])
    lines = [f"import {base}" + (f" as {local}" if local != base else "") for base, local in plain]
    lines += [_import_line(base, names, module.step()) for base, names in sorted(wanted.items())]
    standard = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    lines = [line for line in lines if line not in standard]
    for line in [one for one in standard if _slot_in_standard(draft, one)]:
        standard.remove(line)
    lines = _slot_in(draft, [*standard, *lines])
    for statement in list(emptied):
        top = module.function(statement) is None and not _inside_block(module, statement)
        alone = len(module.line(statement).body) == 1  # type: ignore[attr-defined]
        if lines and top and alone and not _plain_only(lines):
            draft.replace(statement, *draft.join([(line,) for line in lines], ""))
            lines = []
        else:
            draft.delete(statement)
    for plain_import in module.every(cst.Import):
        dead = [alias for alias in plain_import.names if _is_dead(draft, plain_import, alias, rendering)]
        if len(dead) == len(plain_import.names):
            draft.delete(plain_import)
        elif dead:
            kept = [draft.code(alias).rstrip(", ") for alias in plain_import.names if alias not in dead]
            draft.replace(plain_import, f"import {', '.join(kept)}")
    if lines or draft.helpers:
        _add(draft, lines)
    fill_blocks(draft)


def _import_line(base: str, names: list[tuple[str, str]], step: str) -> str:
    spelled = sorted((_spelled(name, local) for name, local in names), key=_import_key)
    line = f"from {base} import {', '.join(spelled)}"
    return line if len(line) <= 120 else f"from {base} import (\n" + "".join(f"{step}{n},\n" for n in spelled) + ")"


def _slot_in(draft: Draft, lines: list[str]) -> list[str]:
    """Put new imports of torch where they sort among the file's own; answer the rest."""
    rest = []
    for line in lines:
        own = [s for s in draft.module.tree.body if isinstance(s, cst.SimpleStatementLine)]
        if line.startswith("import "):
            froms = [s for s in own if isinstance(s.body[0], cst.ImportFrom) and not draft.code(s).startswith("from .")]
            packages = [draft.code(s).split()[1].split(".")[0] for s in froms]
            firsts = [s for s, p in zip(froms, packages, strict=True) if p not in sys.stdlib_module_names]
            if firsts:
                draft.before(firsts[0], (line,), order=-2)
            else:
                rest.append(line)
            continue
        own = [s for s in own if isinstance(s.body[0], cst.ImportFrom) and draft.code(s).startswith("from torch.")]
        after = next((s for s in own if draft.code(s).split()[1] > line.split()[1]), None)
        if line.startswith("from torch.") and after is not None:
            draft.before(after, (line,))
        else:
            rest.append(line)
    return rest


def _slot_in_standard(draft: Draft, line: str) -> bool:
    """Put an import of the standard library behind the last of the file's that sorts before it."""
    own = [s for s in draft.module.tree.body if isinstance(s, cst.SimpleStatementLine)]
    own = [
        s for s in own if isinstance(s.body[0], (cst.Import, cst.ImportFrom)) and not draft.code(s).startswith("from .")
    ]
    own = [s for s in own if draft.code(s).split()[1].split(".")[0].rstrip(",") in sys.stdlib_module_names]
    own = [s for s in own if draft.code(s).split()[1] != "__future__"]
    if not own:
        return False
    key = (line.startswith("from "), line.split()[1])
    before = [s for s in own if (draft.code(s).startswith("from "), draft.code(s).split()[1]) < key]
    if before:
        draft.after(before[-1], (line,), order=-1)
    else:
        draft.before(own[0], (line,), order=-1)
    return True


def _plain_only(lines: list[str]) -> bool:
    return all(line.startswith("import ") for line in lines)


def _spelled(name: str, local: str) -> str:
    return name if name == local else f"{name} as {local}"


def _inside_block(module: Module, statement: cst.CSTNode) -> bool:
    return module.parent(module.line(statement)) is not module.tree


def _is_bound(module: Module, base: str, name: str, local: str, rendering: Rendering) -> bool:
    for line in module.tree.body:
        for small in getattr(line, "body", ()) if isinstance(line, cst.SimpleStatementLine) else ():
            if not rendering.shows(module.span(small).start):
                continue
            if isinstance(small, cst.Import) and not name:
                for alias in small.names:
                    full = get_full_name_for_node(alias.name)
                    if full == base and (get_full_name_for_node(alias.asname.name) if alias.asname else full) == local:
                        return True
            elif isinstance(small, cst.ImportFrom) and not isinstance(small.names, cst.ImportStar):
                whole = f"{base}.{name}" if name else base
                prefix = get_full_name_for_node(small.module) if small.module and not small.relative else None
                for alias in small.names:
                    bound = get_full_name_for_node(alias.asname.name if alias.asname else alias.name)
                    if prefix and f"{prefix}.{get_full_name_for_node(alias.name)}" == whole and bound == local:
                        return True
    return False


def _is_dead(
    draft: Draft, statement: cst.Import | cst.ImportFrom, alias: cst.ImportAlias, rendering: Rendering
) -> bool:
    """Whether an imported name was used and every use is gone. A name that was never used is not ours to judge."""
    module = draft.module
    local = get_full_name_for_node(alias.asname.name if alias.asname else alias.name)
    if local is None or "." in local:
        return False
    full = f"{_base(statement)}{get_full_name_for_node(alias.name)}"
    if any(known == local and f"{base}.{name}".rstrip(".") == full for (base, name), known in draft.needs.items()):
        return False
    scope = module.scope(statement)
    if scope is None or (isinstance(scope, metadata.GlobalScope) and exported(draft, local)):
        return False
    lines = module.lines(module.line(statement))
    if _KEPT.search(module.text.content, lines.start, lines.stop):
        return False
    used = False
    for assignment in scope[local]:
        for access in assignment.references:
            used = True
            if rendering.shows(module.span(access.node).start):
                return False
    return used


def _base(statement: cst.Import | cst.ImportFrom) -> str:
    """`package.` of `from package import ...`."""
    if isinstance(statement, cst.Import) or statement.module is None:
        return ""
    return f"{get_full_name_for_node(statement.module)}."


def _change(draft: Draft, statement: cst.ImportFrom, dead: list[cst.ImportAlias], new: list[str]) -> None:
    module = draft.module
    aliases = list(statement.names)  # type: ignore[arg-type]
    kept = [alias for alias in aliases if alias not in dead]
    if not kept:
        first, last = module.span(aliases[0]).start, _alias_stop(module, aliases[-1])
        multiline = module.text.newline in module.text.content[first:last] or _broken(module, aliases[0])
        separator = f",{module.text.newline}{_lead(module, aliases[0])}" if multiline else ", "
        draft.replace_span(Span(first, last), separator.join(sorted(new, key=_import_key)))
        return
    for alias in dead:
        index = aliases.index(alias)
        start = module.span(alias).start
        if index + 1 < len(aliases):
            draft.replace_span(Span(start, module.span(aliases[index + 1]).start))
    # A dead tail goes from behind the last kept name on.
    last_kept = aliases.index(kept[-1])
    stop = _alias_stop(module, kept[-1])
    if last_kept + 1 < len(aliases):
        draft.edits = [
            e for e in draft.edits if e.inserts or e.span.start < stop or e.span.stop > _alias_stop(module, aliases[-1])
        ]
        draft.replace_span(Span(stop, _alias_stop(module, aliases[-1])))
    for number, one in enumerate(sorted(new, key=_import_key)):
        following = next((a for a in kept if _import_key(module.code(a)) > _import_key(one)), None)
        gap = f",{module.text.newline}{_lead(module, kept[-1])}" if _broken(module, kept[-1]) else ", "
        if following is None:
            draft.edits.append(Edit(Span(stop, stop), (gap + one,), order=number))
        else:
            start = module.span(following).start
            draft.edits.append(Edit(Span(start, start), (one + gap,), order=number))


def _import_key(name: str) -> tuple[int, str]:
    """Sorts names as isort and ruff do: constants, classes, the rest."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2), name


def _alias_stop(module: Module, alias: cst.ImportAlias) -> int:
    node: cst.CSTNode = alias.asname.name if alias.asname else alias.name
    return module.span(node).stop


def _broken(module: Module, alias: cst.ImportAlias) -> bool:
    start = module.span(alias).start
    return not module.text.content[module.text.line_start(start) : start].strip()


def _lead(module: Module, alias: cst.ImportAlias) -> str:
    start = module.span(alias).start
    lead = module.text.content[module.text.line_start(start) : start]
    return lead if not lead.strip() else " " * len(lead)


def _add(draft: Draft, lines: list[str]) -> None:
    module = draft.module
    edited = [e.span.start for e in draft.edits]
    anchor: cst.CSTNode | None = None
    for line in module.tree.body:
        if isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], (cst.Import, cst.ImportFrom)):
            before_uses = all(at < module.lines(line).stop or at >= module.span(line).stop for at in edited)
            if anchor is None or (before_uses and not _code_between(module, anchor, line, edited)):
                anchor = line
    if anchor is None:
        body = module.tree.body
        anchor = body[0] if body and _is_docstring(body[0]) else None
    pieces = [(line,) for line in lines]
    if anchor is None:
        at = module.lines(module.tree.body[0]).start if module.tree.body else 0
        if pieces:
            draft._insert(at, tuple(pieces), "", 0, before=True)
        for text in draft.helpers.values():
            draft._insert(at, ((text,), ("",), ("",)), "", 1, before=True)
        return
    if pieces:
        draft.after(anchor, *pieces)
    at, blank = module.lines(anchor).stop, 0
    while at < len(module.text.content) and not module.text.line(at).strip():
        at, blank = module.text.line_end(at), blank + 1
    gap = [("",)] * max(0, 2 - blank) if at < len(module.text.content) else []
    for number, helper in enumerate(draft.helpers.values(), 1):
        draft.after(anchor, ("",), ("",), (helper,), *(gap if number == len(draft.helpers) else []), order=1)


def _code_between(module: Module, anchor: cst.CSTNode, line: cst.CSTNode, edited: list[int]) -> bool:
    """Whether an edited statement other than an import stands between two lines."""
    start, stop = module.lines(anchor).stop, module.lines(line).start
    body = [one for one in module.tree.body if start <= module.lines(one).start < stop]
    for one in body:
        is_import = isinstance(one, cst.SimpleStatementLine) and isinstance(one.body[0], (cst.Import, cst.ImportFrom))
        span = module.lines(one)
        if not is_import and any(span.start <= at < span.stop for at in edited):
            return True
    return False


def _is_docstring(line: cst.CSTNode) -> bool:
    return (
        isinstance(line, cst.SimpleStatementLine)
        and isinstance(line.body[0], cst.Expr)
        and isinstance(line.body[0].value, cst.SimpleString)
    )
