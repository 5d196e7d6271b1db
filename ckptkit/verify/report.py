"""The answer of `verify`: comparisons with their diagnoses, and whether all that was asked for ran and matched."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .. import __version__
from ..errors import Exit
from .cause import Diagnosis
from .compare import Comparison, Deviation, compare
from .diagnosis import diagnose
from .tolerance import Tolerance
from .trace import Trace, number_to_json

Mode = Literal["strategies", "state", "code"]
SCHEMA = 1
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Finding:
    """One candidate held against its reference. `group` is what findings that belong together share: "fp32, adamw"."""

    comparison: Comparison
    diagnosis: Diagnosis | None
    group: str = ""

    @property
    def label(self) -> str:
        return self.comparison.candidate.label

    @property
    def reason(self) -> str:
        """Why a run is missing or failed, without terminal colours; empty where both ran."""
        sides = (self.comparison.candidate, self.comparison.reference)
        return ANSI.sub("", next((trace.reason for trace in sides if trace.status != "ran"), ""))


@dataclass(frozen=True, slots=True)
class Report:
    """`notes` are sentences for a person: what was migrated, what one GPU cannot show, what the original does wrong."""

    mode: Mode
    title: str
    findings: tuple[Finding, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything that was asked for ran and matched; of nothing it does not hold."""
        return bool(self.findings) and all(f.comparison.verdict == "equal" for f in self.findings)

    @property
    def exit_code(self) -> Exit:
        return Exit.OK if self.ok else Exit.FINDINGS

    def grouped(self) -> dict[str, list[Finding]]:
        """The findings by group, in order."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.group, []).append(finding)
        return groups

    def causes(self) -> list[list[Finding]]:
        """What is not equal, gathered by cause: ranks of a script and strategies of a family fail alike."""
        alike: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.findings:
            verdict, diagnosis = finding.comparison.verdict, finding.diagnosis
            if verdict != "equal":
                key = (diagnosis.cause, diagnosis.says) if diagnosis else (finding.reason,)
                alike.setdefault((verdict, finding.group, *key), []).append(finding)
        return list(alike.values())

    def summary(self) -> str:
        """One line: how many are equal, differ, failed or did not run."""
        counts: Counter[str] = Counter(f.comparison.verdict for f in self.findings)
        names = {"equal": "equal", "mismatch": "not equal", "failed": "failed", "not run": "not run"}
        parts = [f"{counts[verdict]} {name}" for verdict, name in names.items() if counts[verdict]]
        return ", ".join(parts) if parts else "nothing was compared"


def judge(reference: Trace, candidate: Trace, tolerance: Tolerance, group: str = "") -> Finding:
    """Compares and, where they differ, diagnoses."""
    comparison = compare(reference, candidate, tolerance)
    return Finding(comparison, diagnose(comparison), group)


def versions() -> dict[str, str]:
    """What the numbers depend on: versions of ckptkit, Python, torch and the frameworks that are installed."""
    found = {"ckptkit": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in ("torch", "deepspeed", "accelerate", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as `--json` prints it (schema 1); numbers that JSON does not know are strings."""
    return {
        "schema": SCHEMA,
        "command": "verify",
        "mode": report.mode,
        "title": report.title,
        "ok": report.ok,
        "exit_code": int(report.exit_code),
        "summary": report.summary(),
        "seconds": round(report.seconds, 3),
        "environment": dict(report.environment),
        "notes": list(report.notes),
        "findings": [_finding_to_json(finding) for finding in report.findings],
    }


def _finding_to_json(finding: Finding) -> dict[str, Any]:
    c = finding.comparison
    return {
        "group": finding.group,
        "label": c.candidate.label,
        "reference": c.reference.label,
        "strategy": c.candidate.strategy,
        "world_size": c.candidate.world_size,
        "precision": c.candidate.precision,
        "verdict": c.verdict,
        "reason": finding.reason,
        "bit_equal": c.bit_equal,
        "tolerance": c.tolerance.describe(),
        "steps": len(c.candidate.steps),
        "missing_steps": c.missing_steps,
        "losses": [number_to_json(v) for v in c.candidate.losses],
        "reference_losses": [number_to_json(v) for v in c.reference.losses],
        "loss_differences": [number_to_json(v) for v in c.loss_differences],
        "grad_norms": [number_to_json(r.grad_norm) for r in c.candidate.steps],
        "reference_grad_norms": [number_to_json(r.grad_norm) for r in c.reference.steps],
        "largest_loss_difference": number_to_json(c.largest_loss_difference),
        "largest_norm_difference": number_to_json(c.largest_norm_difference),
        "first_deviation": _deviation_to_json(c.first),
        "deviations": len(c.deviations),
        "tensors": [item.describe() for item in c.tensors],
        "first_tensors": [item.describe() for item in c.first_tensors[:10]],
        "diagnosis": _diagnosis_to_json(finding.diagnosis),
    }


def _deviation_to_json(deviation: Deviation | None) -> dict[str, Any] | None:
    if deviation is None:
        return None
    return {
        "what": deviation.what,
        "step": deviation.step,
        "reference": number_to_json(deviation.reference),
        "candidate": number_to_json(deviation.candidate),
        "relative": number_to_json(deviation.relative),
        "allowed": number_to_json(deviation.allowed),
    }


def _diagnosis_to_json(diagnosis: Diagnosis | None) -> dict[str, str] | None:
    if diagnosis is None:
        return None
    return {
        "cause": diagnosis.cause,
        "says": diagnosis.says,
        "evidence": diagnosis.evidence,
        "remedy": diagnosis.remedy,
    }
