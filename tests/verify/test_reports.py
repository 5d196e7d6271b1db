"""Every form of the report says the same: verdicts, numbers, causes; the page opens in a browser without an error."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from ckptkit.errors import Exit
from ckptkit.verify.report import Report, judge, report_to_json
from ckptkit.verify.report_github import github_annotations
from ckptkit.verify.report_html import report_to_html
from ckptkit.verify.report_junit import report_to_junit
from ckptkit.verify.report_svg import nice_ticks
from ckptkit.verify.report_terminal import print_report
from ckptkit.verify.tolerance import FP32
from ckptkit.verify.trace import StepRecord, Trace

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(page: Path, profile: Path) -> subprocess.CompletedProcess[str]:
    """The page's document after its scripts ran, on stdout; what they logged, on stderr."""
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}")  # fmt: skip
    command = [BROWSER, *quiet, "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def trace(label: str, losses: list[float], norms: list[float | None] | None = None) -> Trace:
    steps = [StepRecord(i, loss, norm, (0.1,)) for i, (loss, norm) in enumerate(zip(losses, norms or [1.0] * 99))]  # noqa: B905
    return Trace(label, label, 2, "fp32", tuple(steps))


REFERENCE = trace("single", [3.0, 2.5, 2.25, 2.0])
EQUAL = dataclasses.replace(REFERENCE, label="ddp")
CLOSE = trace("fsdp2", [3.0, 2.5 + 1e-7, 2.25, 2.0])
WRONG = trace("<broken> & co", [3.0, 2.5, 2.3, 2.2], [2.0, 1.0, 1.0, 1.0])
NAN = trace("nan", [3.0, 2.5, math.nan, math.inf])
MISSING = Trace.not_run("zero1", "zero1", "the package 'deepspeed' is not installed")
CRASHED = Trace.failed(
    "zero2", "zero2", "rank 1 died\nTraceback (most recent call last):\n  \x1b[31mred\x1b[0m\nValueError: x]]>"
)


def report(*candidates: Trace) -> Report:
    findings = tuple(judge(REFERENCE, c, FP32, "fp32 · sgd") for c in candidates)
    return Report("strategies", "the title", findings, {"torch": "2", "device": "cpu"}, ("a note",), 1.5)


ALL = report(EQUAL, CLOSE, WRONG, NAN, MISSING, CRASHED)


def test_only_a_report_in_which_everything_ran_and_matched_is_ok():
    assert report(EQUAL, CLOSE).ok and report(EQUAL, CLOSE).exit_code == Exit.OK
    for bad in (WRONG, NAN, MISSING, CRASHED):
        assert report(EQUAL, bad).exit_code == Exit.FINDINGS
    assert report().exit_code == Exit.FINDINGS
    assert ALL.summary() == "2 equal, 2 not equal, 1 failed, 1 not run"


def test_json_is_valid_and_complete():
    body = json.loads(json.dumps(report_to_json(ALL), allow_nan=False))
    assert body["schema"] == 1 and body["ok"] is False and body["exit_code"] == 1
    verdicts = {item["label"]: item["verdict"] for item in body["findings"]}
    assert verdicts == {
        "ddp": "equal", "fsdp2": "equal", "<broken> & co": "mismatch", "nan": "mismatch", "zero1": "not run",
        "zero2": "failed",
    }  # fmt: skip
    broken = body["findings"][2]
    assert broken["diagnosis"]["cause"] == "gradient scale"
    assert broken["first_deviation"]["what"] == "grad_norm" and broken["first_deviation"]["step"] == 0
    assert body["findings"][3]["losses"][2:] == ["nan", "inf"]
    assert all("first 3 steps 1e-06" in item["tolerance"] for item in body["findings"])


def test_junit_counts_and_escapes():
    root = ET.fromstring(report_to_junit(ALL))
    suite = root.find("testsuite")
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6", "failures": "2", "errors": "1", "skipped": "1",
    }  # fmt: skip
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert cases["<broken> & co"].find("failure").get("type") == "gradient scale"
    assert "ValueError: x]]>" in cases["zero2"].find("error").text
    assert "not installed" in cases["zero1"].find("skipped").get("message")


def test_github_lines_are_one_line_each_and_escaped():
    lines = github_annotations(ALL)
    assert len(lines) == 4 and not any("\n" in line for line in lines)
    assert [line.split(" ")[0] for line in lines] == ["::error", "::error", "::warning", "::error"]
    assert "%0A" in lines[0] and "title=ckptkit verify strategies%3A" in lines[0]
    assert github_annotations(report(EQUAL)) == []


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_verdicts_causes_and_bounds(width):
    out = io.StringIO()
    print_report(ALL, Console(file=out, width=width))
    text = out.getvalue()
    for part in (
        "equal, bitwise",
        "NOT EQUAL",
        "FAILED",
        "not run",
        "likely cause: gradient scale",
        "a note",
        "1.3e-06",
    ):
        assert part in text
    assert any("\u2801" <= ch <= "\u28ff" for ch in text), "the loss plot"
    assert max(map(len, text.splitlines())) <= width


def test_the_page_asks_nothing_of_a_network_and_escapes():
    page = report_to_html(ALL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(?!data:,)[^"'\s>]""", page)
    assert "http" not in page and "@import" not in page and "url(" not in page
    assert "<broken>" not in page and "&lt;broken&gt; &amp; co" in page
    assert "prefers-color-scheme:dark" in page
    assert report_to_html(report(MISSING)).count("<svg") <= 2 and report_to_html(report())


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_the_page_opens_in_a_browser(tmp_path):
    path = tmp_path / "report.html"
    # The probe stands in a copy: it hovers over a chart and a row, and writes what it sees into the title.
    probe = """<script>{
    const svg=document.querySelectorAll('svg.chart'),box=svg[0].getBoundingClientRect();
    svg[0].dispatchEvent(new MouseEvent('mousemove',{clientX:box.left+box.width*.9,clientY:box.top+50,bubbles:true}));
    const tip=document.getElementById('tip').textContent;
    document.querySelector('tr[data-key=run2]').dispatchEvent(new MouseEvent('mouseenter'));
    const hot=document.querySelectorAll('.curve.hot').length;
    const curves=[...document.querySelectorAll('.curve path')].filter(p=>p.getBBox().width>50).length;
    const rows=document.querySelectorAll('tbody tr').length;
    document.title='PROBE '+JSON.stringify({charts:svg.length,curves,rows,tip,hot});
    }</script></body>"""
    path.write_text(report_to_html(ALL).replace("</body>", probe), encoding="utf-8")
    done = browse(path, tmp_path / "profile")
    assert ":CONSOLE" not in done.stderr, done.stderr
    seen = json.loads(re.search(r"<title>PROBE (.*?)</title>", done.stdout).group(1).replace("&amp;", "&"))
    assert seen["charts"] == 2 and seen["rows"] == 6
    assert seen["curves"] >= 9  # reference and four runs, then four differences and the bound
    assert seen["tip"].startswith("step 3") and "ddp" in seen["tip"]
    assert seen["hot"] == 2


def test_a_broken_page_would_be_seen(tmp_path):
    """The control of the test above: an error in the page's script does reach the log that it reads."""
    if BROWSER is None:
        pytest.skip("no chromium on this machine")
    path = tmp_path / "bad.html"
    path.write_text("<script>nothing.there()</script>")
    done = browse(path, tmp_path / "profile")
    assert ":CONSOLE" in done.stderr


def test_ticks_are_round_and_inside():
    assert nice_ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert all(3.5 <= t <= 3.7 for t in nice_ticks(3.5, 3.7))
    assert nice_ticks(2.0, 2.0) == [2.0]
