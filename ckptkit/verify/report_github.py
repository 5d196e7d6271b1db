"""The report as GitHub Actions annotations: one line a finding that is not equal, shown on the pull request."""

from .report import Finding, Report
from .report_junit import explanation, headline


def github_annotations(report: Report) -> list[str]:
    """Workflow commands for stdout. What did not run is a warning, everything else that is not equal an error."""
    return [_line(finding, report) for finding in report.findings if finding.comparison.verdict != "equal"]


def _line(finding: Finding, report: Report) -> str:
    c = finding.comparison
    title = f"ckptkit verify {report.mode}: {' '.join(part for part in (finding.group, finding.label) if part)}"
    if c.verdict == "mismatch":
        level, text = "error", f"{headline(finding)}\n{explanation(finding)}"
    else:
        level = "warning" if c.verdict == "not run" else "error"
        text = f"{c.verdict}: {finding.reason}"
    return f"::{level} title={_property(title)}::{_data(text)}"


def _data(text: str) -> str:
    """Escaped as the runner's toolkit does it (actions/toolkit, core/src/command.ts)."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
