"""Runs the rules over a program: facts, then plans, then rewrites, then one rendering for each file."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from ..errors import UsageError
from . import configs, imports, leftover, shard, stale
from .draft import Draft
from .edit import OverlapError
from .files import python_files, worth_parsing
from .flow import Flow
from .module import Module
from .notebook import Notebook, masked, read_notebook
from .program import Program
from .reflow import reflow
from .report import Changed, Failed, Report, Unchanged
from .rule import SOURCES, Rule, chosen
from .text import Text, decode
from .wraps import Wrap, find_wraps

TARGETS = ("fsdp2",)


@dataclass(slots=True)
class _File:
    path: Path
    data: bytes
    notebook: Notebook | None = None

    def text(self) -> Text:
        if self.path.suffix == ".ipynb":
            self.notebook = read_notebook(self.data)
            return self.notebook.text()
        return decode(self.data)

    def encode(self, content: str, encoding: str) -> bytes:
        return self.notebook.bytes_with(content) if self.notebook else content.encode(encoding)


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
    covered = {s for rule in chosen((), ()) if rule.plan or rule.rewrite for s in rule.sources}
    sources = frozenset(SOURCES if source == "auto" else (source,)) & covered
    report = Report()
    given = [Path(p) for p in paths]
    others = configs.suffixes()
    files = {p: _File(p, p.read_bytes()) for p in python_files(given) if p.suffix not in others}
    contents = {path: file.data for path, file in files.items()}
    wanted = worth_parsing(contents, sources)
    report.skipped = len(files) - len(wanted)
    program = Program()
    failures: dict[Path, Failed] = {}
    for path in files:
        program.unread[path] = _parser(files[path], failures)
    for path in sorted(wanted):
        program.load(path)
    drafts = _drafts(program, sources)
    for draft in drafts:
        _guarded(draft, failures, lambda d: _plan(d, active))
    for draft in drafts:
        _guarded(draft, failures, lambda d: _rewrite(d, active))
    for draft in drafts:
        if draft.module.path in failures:
            continue
        _guarded(draft, failures, lambda d: _finish(d, files[d.module.path], sources, report))
    for path in sorted(failures):
        report.outcomes.append(failures[path])
    _convert(given, {rule.name for rule in active}, frozenset(SOURCES if source == "auto" else (source,)), report)
    report.outcomes.sort(key=lambda one: str(one.path))
    report.findings.sort()
    if write:
        for one in report.changed:
            _store(one.path, one.data)
        report.written = True
    return report


def _parser(file: _File, failures: dict[Path, Failed]) -> Callable[[], Module | None]:
    def parse() -> Module | None:
        try:
            return Module(file.path, file.text())
        except cst.ParserSyntaxError as error:
            failures[file.path] = Failed(file.path, f"syntax error: {error.message}", error.raw_line)
        except (SyntaxError, RecursionError) as error:
            failures[file.path] = Failed(file.path, f"syntax error: {error}", getattr(error, "lineno", 0) or 0)
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


def _guarded(draft: Draft, failures: dict[Path, Failed], step: Callable[[Draft], None]) -> None:
    path = draft.module.path
    if path in failures:
        return
    try:
        step(draft)
    except OverlapError as error:
        failures[path] = Failed(path, f"rule {draft.rule}: {error}", bug=True)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"rule {draft.rule}: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        failures[path] = Failed(path, reason, bug=True)


def _plan(draft: Draft, active: tuple[Rule, ...]) -> None:
    for wrap in draft.wraps:
        for node in wrap.unresolved:
            wrap.plan.refuse("wrap", f"the arguments {draft.code(node)!r} are only known at run time")
        if wrap.subject is None:
            wrap.plan.refuse("wrap", "no model is passed to this call")
            continue
        kept = (list(draft.findings), list(draft.edits), dict(draft.needs), dict(draft.helpers))
        for rule in active:
            if rule.plan is not None and wrap.source in rule.sources:
                draft.rule = rule.name
                rule.plan(draft, wrap)
        if reason := shard.obstacle(draft.module, wrap, draft.wraps):
            wrap.plan.refuse("wrap", reason)
        if wrap.plan.refused:  # nothing of what was prepared for it may show
            draft.findings, draft.edits, draft.needs, draft.helpers = kept


def _rewrite(draft: Draft, active: tuple[Rule, ...]) -> None:
    for rule in active:
        if rule.rewrite is not None:
            draft.rule = rule.name
            rule.rewrite(draft)
    for wrap in draft.wraps:
        draft.rule = "wrap"
        shard.write(draft, wrap)


def _finish(draft: Draft, file: _File, sources: frozenset[str], report: Report) -> None:
    draft.rule = "imports"
    imports.sweep(draft, sources)
    stale.report(draft)
    draft.rule = "leftover"
    leftover.report(draft, sources)
    draft.rule = "imports"
    imports.mend(draft)
    old = draft.module.text.content
    new = draft.rendering().whole()
    report.findings.extend(draft.findings)
    report.commands.extend(line for line in draft.commands if line not in report.commands)
    if new == old:
        report.outcomes.append(Unchanged(draft.module.path))
        return
    plain = masked(new) if file.notebook else new
    cst.parse_module(plain)  # what does not parse is a bug of ours, never a file on disk
    new = reflow(old, new, plain, draft.module.step())
    data = file.encode(new, draft.module.text.encoding)
    report.outcomes.append(Changed(draft.module.path, old, new, data))


def _convert(paths: list[Path], names: set[str], sources: frozenset[str], report: Report) -> None:
    """Convert the configuration files beside the code."""
    active = [one for one in configs.converters() if one.name in names and sources & set(one.sources)]
    for path in configs.config_files(paths):
        found = configs.convert(path, path.read_bytes(), active)
        if found is None:
            continue
        old, new, findings = found
        report.findings.extend(findings)
        if new != old:
            report.outcomes.append(Changed(path, old, new, new.encode()))
        elif findings:
            report.outcomes.append(Unchanged(path))


def _store(path: Path, data: bytes) -> None:
    """Write beside the file and rename, keeping its mode, so that an interruption leaves the old or the new file."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, path.stat().st_mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
