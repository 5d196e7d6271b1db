"""The likely cause of a mismatch, read from its signature: what differed first, in which tensors, by which ratio.

Each rule is a function from a `Comparison` to a `Diagnosis` or None; the first that fits is the likely cause, so they
stand in the order of time: what can already be wrong before the first step, in the first forward pass, in the first
gradient, in the first update, and later.
"""

from __future__ import annotations

from collections.abc import Callable

from .cause import Diagnosis
from .compare import Comparison
from .signatures_resume import moments, step_counter, stopped_early
from .signatures_start import data_order, forward_pass, initial_weights, masters, not_finite, rank_weights
from .signatures_update import clipping, frozen, gradient_scale, group_options, loss_scale, partly_frozen, schedule

RULES: tuple[Callable[[Comparison], Diagnosis | None], ...] = (
    not_finite,
    masters,
    rank_weights,
    initial_weights,
    loss_scale,
    data_order,
    forward_pass,
    frozen,
    schedule,
    gradient_scale,
    clipping,
    step_counter,
    group_options,
    moments,
    partly_frozen,
    stopped_early,
)


def diagnose(comparison: Comparison) -> Diagnosis | None:
    """The likely cause of a mismatch; None when the two runs match or one of them did not run."""
    if comparison.verdict != "mismatch":
        return None
    for rule in RULES:
        found = rule(comparison)
        if found is not None:
            return found
    return unknown(comparison)


def unknown(c: Comparison) -> Diagnosis:
    """What is known of a mismatch that no rule explains."""
    recorded = c.reference.initial and c.candidate.initial
    where = c.first_tensors[0].describe() if c.first_tensors else f"weights {'agree' if recorded else 'unknown'}"
    if c.first is not None:
        first = f"step {c.first.step}: {c.first.what} differs by {c.first.relative:.2e} relative"
    else:
        first = c.tensors[0].describe() if c.tensors else "losses agree"
    return Diagnosis(
        "unknown",
        "the mismatch has no signature that ckptkit knows",
        f"{first}; {where}",
        "compare the two runs at that step; --json holds all numbers",
    )
