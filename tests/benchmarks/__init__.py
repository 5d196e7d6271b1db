"""Benchmarks: they print ratios measured side by side in one run, and assert nothing about time."""
