"""The code rewriter: `run` moves training code from FSDP1, DDP or DeepSpeed to FSDP2. Imports no torch."""

from .engine import run
from .grade import Finding, Grade
from .report import Changed, Failed, Report, Unchanged
from .rule import Rule, rules

__all__ = ["Changed", "Failed", "Finding", "Grade", "Report", "Rule", "Unchanged", "rules", "run"]
