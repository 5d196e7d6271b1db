"""The report as a person reads it in a terminal: a table, a small loss plot, and what is likely wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .plot import braille_plot
from .report import Finding, Report

STYLES = {"equal": "green", "mismatch": "bold red", "failed": "bold red", "not run": "yellow"}
WORDS = {"equal": "equal", "mismatch": "NOT EQUAL", "failed": "FAILED", "not run": "not run"}


def print_report(report: Report, console: Console) -> None:
    """Everything on one screen where nothing is wrong; a panel for each finding that is."""
    console.print(Text(f"verify {report.mode}: {report.title}", style="bold"))
    for group, findings in report.grouped().items():
        console.print(_table(group, findings))
        plot = _plot(findings)
        if plot is not None:
            console.print(plot)
    for alike in report.causes():
        console.print(_panel(alike))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print(Text(f"tolerance: {_tolerances(report)}", style="dim"))
    console.print(Text("environment: " + ", ".join(f"{k} {v}" for k, v in report.environment.items()), style="dim"))
    style = "bold green" if report.ok else "bold red"
    console.print(Text(f"{report.summary()} in {report.seconds:.1f} s", style=style))


def _table(group: str, findings: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=group or None, title_justify="left", pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for heading in ("steps", "last loss", "loss diff", "norm diff"):
        table.add_column(heading, justify="right", no_wrap=True)
    references = {id(f.comparison.reference): f.comparison.reference for f in findings}
    if len(references) == 1:
        reference = next(iter(references.values()))
        name, word = Text(reference.label, style="dim"), Text("reference", style="dim")
        table.add_row(name, word, str(len(reference.steps)), _last(reference.losses), "", "")
    for finding in findings:
        c = finding.comparison
        table.add_row(
            c.candidate.label,
            Text(WORDS[c.verdict] + (", bitwise" if c.bit_equal and c.verdict == "equal" else ""), STYLES[c.verdict]),
            str(len(c.candidate.steps)),
            _last(c.candidate.losses),
            difference(c.largest_loss_difference),
            difference(c.largest_norm_difference),
        )
    return table


def _last(losses: Sequence[float]) -> str:
    return f"{losses[-1]:.6f}" if losses else "-"


def difference(value: float | None) -> str:
    """A relative difference as it is printed everywhere: 0 is exactly equal."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


def _plot(findings: Sequence[Finding]) -> RenderableType | None:
    """The reference's curve and, where one differs, the worst candidate's beside it."""
    ran = [f for f in findings if len(f.comparison.reference.losses) > 1]
    if not ran:
        return None
    worst = max(ran, key=lambda f: (f.comparison.verdict == "mismatch", f.comparison.largest_loss_difference or 0.0))
    curves = [worst.comparison.reference.losses]
    caption = Text("loss by step, reference", style="dim")
    if worst.comparison.verdict == "mismatch" and worst.comparison.candidate.losses:
        curves.append(worst.comparison.candidate.losses)
        caption = Text.assemble(
            ("loss by step, ", "dim"), ("reference", "cyan"), (" and ", "dim"), (worst.label, "red")
        )
    plot = braille_plot(curves, styles=("cyan", "red"))
    return Group(caption, *plot) if plot else None


def _panel(alike: Sequence[Finding]) -> Panel:
    """What several findings have in common, with the numbers of the first."""
    finding = alike[0]
    c, diagnosis = finding.comparison, finding.diagnosis
    lines: list[RenderableType] = []
    if finding.reason:
        lines.append(Text(finding.reason))
    if c.first is not None:
        first = c.first
        bound = first.allowed / abs(first.reference) if first.reference else 0.0
        lines.append(
            Text(
                f"first at step {first.step}: {first.what} {first.candidate:.9g} against {first.reference:.9g}, "
                f"{difference(first.relative)} relative (allowed {difference(bound)})"
            )
        )
    if c.first_tensors:
        lines.append(Text(f"first tensor: {c.first_tensors[0].describe()}"))
    if diagnosis is not None:
        lines.append(Text.assemble(("likely cause: ", "bold"), (diagnosis.cause, "bold red"), f" - {diagnosis.says}"))
        lines.append(Text(f"evidence: {diagnosis.evidence}"))
        lines.append(Text(f"look at: {diagnosis.remedy}"))
    title = " · ".join(part for part in (finding.group, ", ".join(each.label for each in alike)) if part)
    return Panel(Group(*lines), title=title, title_align="left", border_style=STYLES[c.verdict])


def _tolerances(report: Report) -> str:
    return "; ".join(dict.fromkeys(f.comparison.tolerance.describe() for f in report.findings)) or "none"
