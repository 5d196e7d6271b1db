"""Answers a script that asks for CUDA and NCCL with CPU and gloo, so that a GPU program can be checked without a GPU.

Only what is asked changes, not what is computed: devices named cuda become cpu, nccl becomes gloo, and calls that only
steer the hardware (streams, pinned memory, memory statistics) do nothing. Library code keeps hearing the truth, that
there is no CUDA; only the script itself is told that there is.
"""

from __future__ import annotations

from . import cpu_cuda, cpu_distributed, cpu_tensors


def answer() -> None:
    """Called once per process, right after torch was imported. Does nothing where it was called before."""
    cpu_tensors.answer()
    cpu_cuda.answer()
    cpu_distributed.answer()
