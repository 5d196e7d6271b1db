"""The report as JUnit XML, which CI systems show as tests."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from .report import Finding, Report
from .report_terminal import difference


def report_to_junit(report: Report) -> str:
    """One test case a finding: a mismatch is a failure, a crash an error, a strategy that did not run is skipped.

    A skipped case does not make the command succeed: exit 0 means that all that was asked for ran and matched.
    """
    verdicts = [f.comparison.verdict for f in report.findings]
    counts = {"tests": len(verdicts), "failures": verdicts.count("mismatch"), "errors": verdicts.count("failed"),
              "skipped": verdicts.count("not run")}  # fmt: skip
    suites = ET.Element("testsuites", {k: str(v) for k, v in counts.items()})
    suite = ET.SubElement(
        suites, "testsuite", {"name": f"ckptkit verify {report.mode}", "time": f"{report.seconds:.3f}",
                              **{k: str(v) for k, v in counts.items()}},
    )  # fmt: skip
    properties = ET.SubElement(suite, "properties")
    for name, value in report.environment.items():
        ET.SubElement(properties, "property", {"name": name, "value": _xml(value)})
    for finding in report.findings:
        _case(suite, finding, report)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _case(suite: ET.Element, finding: Finding, report: Report) -> None:
    c = finding.comparison
    group = f".{finding.group}" if finding.group else ""
    case = ET.SubElement(suite, "testcase", {"classname": f"verify.{report.mode}{group}", "name": finding.label})
    detail = finding.reason
    if c.verdict == "mismatch":
        cause = finding.diagnosis.cause if finding.diagnosis else "unknown"
        failure = ET.SubElement(case, "failure", {"type": cause, "message": _xml(headline(finding))})
        failure.text = _xml(explanation(finding))
    elif c.verdict == "failed":
        ET.SubElement(case, "error", {"message": _xml(detail.partition("\n")[0])}).text = _xml(detail)
    elif c.verdict == "not run":
        ET.SubElement(case, "skipped", {"message": _xml(detail)})


def headline(finding: Finding) -> str:
    """The mismatch in one line: where it begins, how large, and its likely cause."""
    c = finding.comparison
    if c.first is not None:
        where = f"{c.first.what} differs at step {c.first.step} by {difference(c.first.relative)} relative"
    elif c.tensors:
        where = c.tensors[0].describe()
    else:
        where = f"{c.missing_steps} steps are missing"
    return f"{where}; likely cause: {finding.diagnosis.cause}" if finding.diagnosis else where


def explanation(finding: Finding) -> str:
    """The diagnosis and the tensors concerned, a line each."""
    lines = [item.describe() for item in finding.comparison.first_tensors[:5]]
    if finding.diagnosis is not None:
        d = finding.diagnosis
        lines = [f"{d.cause}: {d.says}", f"evidence: {d.evidence}", f"look at: {d.remedy}", *lines]
    return "\n".join(lines)


def _xml(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold (terminal colours in a traceback, say)."""
    return "".join(ch for ch in text if ch in "\t\n\r" or ord(ch) >= 0x20)
