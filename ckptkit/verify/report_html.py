"""The report as one self-contained HTML page: curves, differences, the table, the diagnosis, the environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from .compare import Comparison
from .report import Finding, Report
from .report_page import SCRIPT, STYLE
from .report_svg import Series, difference_chart, loss_chart
from .report_terminal import difference
from .trace import Trace, number_to_json

WORDS = {"equal": "equal", "mismatch": "not equal", "failed": "failed", "not run": "not run"}
COLOURS = 6


def report_to_html(report: Report) -> str:
    """The page. Everything is in it, it asks no network for anything; the curves are there without JavaScript."""
    chart_data: dict[str, Any] = {}
    groups = [_section(index, name, found, chart_data) for index, (name, found) in enumerate(report.grouped().items())]
    badge = "equal" if report.ok else "mismatch"
    word = "everything matches" if report.ok else "does not match"
    data = json.dumps(chart_data, allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<link rel="icon" href="data:,"><title>ckptkit verify: {escape(report.title)}</title><style>{STYLE}</style></head>
<body><main>
<header><div><h1>{escape(report.title)}</h1>
<p>ckptkit verify, {escape(report.mode)} · {escape(report.summary())} · {report.seconds:.1f} s</p></div>
<span class="badge {badge}-v">{word}</span></header>
{_diagnoses(report)}
{"".join(groups)}
{_notes(report)}
<h2>How it was judged</h2><div class="pair">{_tolerances(report)}{_environment(report)}</div>
<footer>Differences are relative to the reference; 0 means equal to the last bit. A run that is missing or failed never
counts as equal.</footer>
</main><div id="tip"></div>
<script type="application/json" id="data">{data}</script><script>{SCRIPT}</script></body></html>
"""


def _section(index: int, name: str, findings: Sequence[Finding], chart_data: dict[str, Any]) -> str:
    losses, differences, bound = _series(findings)
    blocks = []
    for kind, title, series, chart in (
        ("loss", "Loss", losses, loss_chart(losses, f"loss curves {name}")),
        ("diff", "Difference from the reference, log scale", differences,
         difference_chart(differences, bound, f"differences {name}")),
    ):  # fmt: skip
        if chart:
            key = f"{kind}{index}"
            chart_data[key] = [{"label": s.label, "values": [number_to_json(v) for v in s.values]} for s in series]
            blocks.append(
                f'<div class="card"><h3>{title}</h3><div data-chart="{key}">{chart}</div>'
                f"{_legend(series, bound=kind == 'diff')}</div>"
            )
    heading = f"<h2>{escape(name)}</h2>" if name else ""
    charts = f'<div class="pair">{"".join(blocks)}</div>' if blocks else ""
    return f"<section>{heading}{charts}{_table(findings)}</section>"


def _series(findings: Sequence[Finding]) -> tuple[list[Series], list[Series], list[float]]:
    """Curves of the references and candidates, of the differences, and the bound per step."""
    losses: list[Series] = []
    seen: list[Trace] = []
    for number, finding in enumerate(findings):
        reference = finding.comparison.reference
        if reference.losses and not any(reference is other for other in seen):
            seen.append(reference)
            losses.append(Series(f"ref{number}", reference.label + " (reference)", reference.losses, "reference"))
    differences = []
    for number, (finding, css) in enumerate(zip(findings, _colours(findings), strict=True)):
        c = finding.comparison
        if c.candidate.losses:
            losses.append(Series(f"run{number}", finding.label, c.candidate.losses, css))
            differences.append(Series(f"run{number}", finding.label, c.loss_differences, css))
    # The reference is drawn last so that its dots stay visible on equal curves.
    return losses[len(seen) :] + losses[: len(seen)], differences, _bound(findings)


def _colours(findings: Sequence[Finding]) -> list[str]:
    """The class of each finding's curve: what is equal is grey, what is not has a colour of its own."""
    off = [number for number, f in enumerate(findings) if f.comparison.verdict == "mismatch"]
    return [f"c{off.index(n) % COLOURS}" if n in off else "equal" for n in range(len(findings))]


def _bound(findings: Sequence[Finding]) -> list[float]:
    c = next((f.comparison for f in findings if f.comparison.reference.losses), None)
    if c is None:
        return []
    steps = zip(c.reference.steps, c.reference.losses, strict=True)
    return [c.tolerance.allowed(record.step, loss) / abs(loss) if loss else 0.0 for record, loss in steps]


def _legend(series: Sequence[Series], *, bound: bool) -> str:
    """One entry a curve that stands out; the equal ones, which lie on each other, share one."""
    entries, equal = [], [s for s in series if s.css == "equal"]
    for s in series:
        if s.css != "equal":
            entries.append(f'<span class="{s.css}"><i></i>{escape(s.label)}</span>')
    if equal:
        label = equal[0].label if len(equal) == 1 else f"{len(equal)} equal runs"
        entries.append(f'<span class="equal"><i></i>{escape(label)}</span>')
    if bound:
        entries.append('<span class="bound"><i></i>allowed</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


def _table(findings: Sequence[Finding]) -> str:
    colours = _colours(findings)
    rows = "".join(_row(number, finding, colours[number]) for number, finding in enumerate(findings))
    return (
        '<div class="card scroll"><table><thead><tr><th>run</th><th>verdict</th><th class="n">ranks</th>'
        '<th class="n">steps</th><th class="n">first loss</th><th class="n">last loss</th>'
        '<th class="n">max loss diff</th><th class="n">max norm diff</th>'
        "<th>remark</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(number: int, finding: Finding, css: str) -> str:
    c = finding.comparison
    trace = c.candidate
    ends = (f"{trace.losses[0]:.8g}", f"{trace.losses[-1]:.8g}") if trace.losses else ("-", "-")
    cells = [str(trace.world_size or "-"), str(len(trace.steps)), *ends, difference(c.largest_loss_difference),
             difference(c.largest_norm_difference)]  # fmt: skip
    numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
    swatch = f'<span class="swatch {css}"></span>' if c.verdict == "mismatch" else ""
    return (
        f'<tr data-key="run{number}"><td class="run">{swatch}{escape(finding.label)}</td><td>{_badge(c)}</td>{numbers}'
        f'<td class="remark">{escape(_remark(finding))}</td></tr>'
    )


def _remark(finding: Finding) -> str:
    c = finding.comparison
    if c.verdict == "equal":
        return "equal to the last bit" if c.bit_equal else "within the bounds"
    if c.verdict == "mismatch":
        since = f" from step {c.first.step} on" if c.first is not None else ""
        return (finding.diagnosis.cause if finding.diagnosis else "unknown") + since
    return finding.reason.partition("\n")[0]


def _badge(c: Comparison) -> str:
    return f'<span class="badge {c.verdict.replace(" ", "")}-v">{WORDS[c.verdict]}</span>'


def _diagnoses(report: Report) -> str:
    return "".join(_card(alike) for alike in report.causes())


def _card(alike: Sequence[Finding]) -> str:
    """What several findings have in common, with the numbers of the first."""
    first = alike[0]
    runs = " · ".join(part for part in (first.group, ", ".join(each.label for each in alike)) if part)
    verdict, diagnosis = first.comparison.verdict, first.diagnosis
    if diagnosis is None:
        line, _, rest = first.reason.partition("\n")
        more = f"<pre>{escape(rest)}</pre>" if rest else ""
        css = verdict.replace(" ", "")
        return f'<div class="card diagnosis {css}"><h3>{escape(runs)}: {WORDS[verdict]}</h3>{escape(line)}{more}</div>'
    tensors = first.comparison.first_tensors
    tensor = tensors[0].describe() if tensors else ""
    facts = [("runs", runs), ("evidence", diagnosis.evidence), ("first tensor", tensor), ("look at", diagnosis.remedy)]
    listed = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts if text)
    return (
        f'<div class="card diagnosis"><h3>Likely cause: {escape(diagnosis.cause)}</h3>{escape(diagnosis.says)}'
        f"<dl>{listed}</dl></div>"
    )


def _notes(report: Report) -> str:
    if not report.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f'<h2>Notes</h2><div class="card"><ul class="notes">{items}</ul></div>'


def _tolerances(report: Report) -> str:
    lines = dict.fromkeys(f.comparison.tolerance.describe() for f in report.findings)
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="card"><h3>Tolerances</h3><ul class="notes">{items}</ul></div>'


def _environment(report: Report) -> str:
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report.environment.items())
    return f'<div class="card"><h3>Environment</h3><dl class="facts">{facts}</dl></div>'
