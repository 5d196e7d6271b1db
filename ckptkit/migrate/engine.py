"""Runs the rules over a program: facts, then plans, then rewrites, then one rendering for each file."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import libcst as cst

from ..errors import UsageError
from . import blank, configs, imports, leftover, shard, sharing, stale, sweep
from .draft import Draft
from .edit import OverlapError
from .files import found_files, is_small, worth_parsing
from .flow import Flow
from .grade import Finding, Grade
from .module import Module
from .plan import ShardPlan
from .program import Program
from .reflow import reflow, tree_of
from .report import Changed, Failed, Report, Unchanged
from .rule import SOURCES, Rule, chosen
from .source_file import SourceFile, read_files
from .store import Write, store
from .wraps import Wrap, find_wraps

TARGETS = ("fsdp2",)


def run(
    paths: Iterable[str | os.PathLike[str]],
    *,
    source: str = "auto",
    target: str = "fsdp2",
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    write: bool = False,
) -> Report:
    """Migrate files and directories as one program; nothing is written unless `write`.

    Raises UsageError on an unknown source, target or rule, SourceError on a missing path. A file that cannot be
    parsed is an outcome, not an error.
    """
    if source != "auto" and source not in SOURCES:
        raise UsageError(f"unknown source {source!r}", hint=f"--from takes auto, {', '.join(SOURCES)}")
    if target not in TARGETS:
        raise UsageError(f"unknown target {target!r}", hint=f"--to takes {', '.join(TARGETS)}")
    active = chosen(tuple(select), tuple(ignore))
    covered = {s for rule in chosen((), ()) if rule.plan or rule.complete or rule.rewrite for s in rule.sources}
    sources = frozenset(SOURCES if source == "auto" else (source,)) & covered
    report = Report()
    given = [Path(p) for p in paths]
    failures: dict[Path, Failed] = {}  # by the path of the module
    files = read_files(given, configs.suffixes(), failures)
    owners = {path: file for file in files for path in file.modules}
    wanted = worth_parsing({path: file.searched(path) for path, file in owners.items()}, sources)
    report.skipped = len(files) - len({owners[path].path for path in wanted})
    program = Program({}, {path: _parser(file, path, failures) for path, file in owners.items()})
    for path in sorted(wanted):
        program.load(path)
    drafts = _drafts(program, sources)
    while True:
        for draft in drafts:
            _guarded(draft, owners, failures, lambda d: _plan(d, active))
        if not _plan_anew(drafts):
            break
    for draft in drafts:
        _guarded(draft, owners, failures, lambda d: _rewrite(d, active))
    for draft in drafts:
        _guarded(draft, owners, failures, lambda d: _finish(d, owners[d.module.path], sources, report))
    report.outcomes.extend(failures.values())
    broken = {one.path for one in failures.values()}
    report.outcomes.extend(file.outcome() for file in files if file.finished and file.path not in broken)
    report.findings = [one for one in report.findings if one.path not in broken]
    names = {rule.name for rule in active}
    wanted_sources = frozenset(SOURCES if source == "auto" else (source,))
    converters = [one for one in configs.converters() if one.name in names and wanted_sources & set(one.sources)]
    _convert(given, converters, report)
    _launch_cells([file for file in files if file.path not in broken], converters, report)
    report.outcomes.sort(key=lambda one: str(one.path))
    report.findings.sort()
    if write:
        store(Write(one.path, one.original, one.data) for one in report.changed)
        report.written = True
    return report


def _parser(file: SourceFile, path: Path, failures: dict[Path, Failed]) -> Callable[[], Module | None]:
    def parse() -> Module | None:
        try:
            return Module(path, file.modules[path]())
        except cst.ParserSyntaxError as error:
            failures[path] = file.failed(path, f"syntax error: {error.message}", error.raw_line)
        except (SyntaxError, RecursionError, ValueError) as error:
            line = getattr(error, "lineno", 0) or 0
            failures[path] = file.failed(path, f"syntax error: {error}", line)
        return None

    return parse


def _drafts(program: Program, sources: frozenset[str]) -> list[Draft]:
    flow = Flow(program)
    drafts: list[Draft] = []
    all_wraps: list[Wrap] = []  # shared: each draft sees the wraps of the whole program
    peers: dict[int, Draft] = {}
    seen: set[Path] = set()
    while True:  # following an import may load further files
        new = [m for m in program if m.path not in seen]
        if not new:
            return [draft for draft in drafts if not draft.module.skipped]
        for module in new:
            seen.add(module.path)
            wraps = [] if module.skipped else find_wraps(flow, module, sources)
            all_wraps.extend(wraps)
            peers[id(module)] = Draft(module, flow, wraps, all_wraps, peers)
            drafts.append(peers[id(module)])


def _guarded(
    draft: Draft, owners: dict[Path, SourceFile], failures: dict[Path, Failed], step: Callable[[Draft], None]
) -> None:
    path = draft.module.path
    if path in failures:
        return
    file = owners[path]
    try:
        step(draft)
    except OverlapError as error:
        failures[path] = file.failed(path, f"rule {draft.rule}: {error}", bug=True)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"rule {draft.rule}: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        failures[path] = file.failed(path, reason, bug=True)


def _plan(draft: Draft, active: tuple[Rule, ...]) -> None:
    for wrap in draft.wraps:
        _plan_wrap(draft, wrap, active)


def _plan_wrap(draft: Draft, wrap: Wrap, active: tuple[Rule, ...]) -> None:
    for node in wrap.unresolved:
        wrap.plan.refuse("wrap", f"the arguments {draft.code(node)!r} are only known at run time")
    if wrap.subject is None:
        wrap.plan.refuse("wrap", "no model is passed to this call")
        return
    kept = (list(draft.findings), list(draft.edits), dict(draft.needs), dict(draft.helpers))
    for rule in active:
        if rule.plan is not None and wrap.source in rule.sources:
            draft.rule = rule.name
            rule.plan(draft, wrap)
    for rule in active:
        if rule.complete is not None and wrap.source in rule.sources:
            draft.rule = rule.name
            rule.complete(draft, wrap)
    if reason := shard.obstacle(draft.module, wrap, draft.wraps):
        wrap.plan.refuse("wrap", reason)
    if wrap.plan.refused:  # nothing of what was prepared for it may show
        draft.findings, draft.edits, draft.needs, draft.helpers = kept


def _plan_anew(drafts: list[Draft]) -> bool:
    """Take all plans back where one would change objects that a wrap which stays takes as well; it then keeps them."""
    found = [
        wrap
        for draft in drafts
        for wrap in draft.wraps
        if "keeps" not in wrap.facts and sharing.changes_what_stays(draft.flow, wrap, draft.all_wraps)
    ]
    for wrap in found:
        wrap.facts["keeps"] = True
    for draft in drafts if found else ():
        draft.restart()
        for wrap in draft.wraps:
            wrap.plan = ShardPlan()
            wrap.facts = {name: fact for name, fact in wrap.facts.items() if name == "keeps"}
    return bool(found)


def _rewrite(draft: Draft, active: tuple[Rule, ...]) -> None:
    for wrap in draft.wraps:
        for node, pieces in [] if wrap.plan.refused else wrap.plan.edits:
            draft.replace(node, *pieces)
    for rule in active:
        if rule.rewrite is not None:
            draft.rule = rule.name
            rule.rewrite(draft)
    for wrap in draft.wraps:
        draft.rule = "wrap"
        shard.write(draft, wrap)


def _finish(draft: Draft, file: SourceFile, sources: frozenset[str], report: Report) -> None:
    draft.rule = "imports"
    sweep.sweep(draft, sources)
    stale.report(draft)
    sharing.report(draft)
    draft.rule = "leftover"
    leftover.report(draft, sources)
    draft.rule = "imports"
    imports.mend(draft)
    old = draft.module.text.content
    new = blank.closed(old, draft.rendering().whole())
    if new != old:
        plain = file.parsed_as(new)
        _parse(draft.module.text.masked, plain)
        new = reflow(old, new, plain, draft.module.step())
        file.take(old, new, draft.module.text.encoding)
    file.finished = True
    report.findings.extend(file.located(finding, old) for finding in draft.findings)
    report.commands.extend(line for line in draft.commands if line not in report.commands)


def _parse(old: str, new: str) -> None:
    """What does not parse is a bug of ours, never a file on disk: LibCST knows newer syntax than this Python may."""
    cst.parse_module(new)
    try:
        tree_of(old)
    except SyntaxError:
        return
    tree_of(new)


def _launch_cells(files: list[SourceFile], active: list[configs.Converter], report: Report) -> None:
    """Report what the shell lines of notebooks should become; they are not changed."""
    for file in files:
        for cell, first, text in file.notebook.shell_lines() if file.notebook else ():
            found = configs.convert(file.path.with_suffix(".sh"), text.encode(), active)
            if found is None:
                continue
            if found.after != found.before:
                message = f"write: {' '.join(found.after.replace(chr(92), ' ').split())}"
                one = Finding(file.path, first, 1, Grade.MANUAL, found.findings[0].rule, message, cell)
                report.findings.append(one)
                continue
            for one in found.findings:
                report.findings.append(replace(one, path=file.path, cell=cell, line=first + one.line - 1))


def _convert(paths: list[Path], active: list[configs.Converter], report: Report) -> None:
    """Convert the configuration files beside the code."""
    for path in found_files(paths, configs.suffixes()):
        if path.suffix not in configs.suffixes() or not is_small(path):
            continue
        try:
            data = path.read_bytes()
            found = configs.convert(path, data, active)
        except OSError as error:
            report.outcomes.append(Failed(path, f"cannot be read: {error.strerror or error}"))
            continue
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            report.outcomes.append(Failed(path, reason, bug=True))
            continue
        if found is None:
            continue
        report.findings.extend(found.findings)
        if found.after != found.before:
            report.outcomes.append(Changed(path, found.before, found.after, found.data, data))
        elif found.findings:
            report.outcomes.append(Unchanged(path))
