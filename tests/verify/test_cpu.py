"""A script that asks for CUDA in every common way runs on CPU; without the answers it does not (the control)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptkit.verify.script_launch import Script, run_script

CALLS = Path(__file__).parent / "scripts" / "cuda_calls.py"


def launch(device: str):
    return run_script(Script(CALLS, (), "torchrun", 2, steps=1, device=device, timeout=120))


@pytest.mark.slow
def test_calls_that_name_cuda_are_answered_by_cpu():
    launched = launch("cpu")
    assert launched.complete, launched.traces[0].reason
    assert [len(trace.steps) for trace in launched.traces] == [1, 1]
    assert launched.notes["compute_dtype"] == "bf16"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the script needs no answers")
def test_without_the_answers_the_same_script_fails():
    launched = launch("cuda")
    assert not launched.complete and "AssertionError" in launched.traces[0].reason
