"""What a GPU is needed for: the strategies form under NCCL, and a script without the answers of the CPU.

One prepared check, `make verify-gpu`, under six minutes on one GPU; skipped where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptkit.verify.matrix import verify_strategies
from ckptkit.verify.options import MatrixOptions
from ckptkit.verify.script import ScriptOptions, verify_scripts

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_strategy_equals_a_single_process_on_cuda(precision):
    report = verify_strategies(MatrixOptions(precisions=(precision,), steps=6, device="cuda"))
    assert report.environment["device"] == "cuda" and report.environment["world size"] == str(torch.cuda.device_count())
    wrong = {
        f.label: f.reason or f.diagnosis for f in report.findings if f.comparison.verdict in ("mismatch", "failed")
    }
    assert not wrong
    ran = {f.label for f in report.findings if f.comparison.verdict == "equal"}
    assert {"ddp", "fsdp1", "fsdp2"} <= ran
    assert torch.cuda.device_count() > 1 or any("cannot show" in note for note in report.notes)


def test_a_script_runs_on_cuda_as_it_is():
    options = ScriptOptions(world_size=torch.cuda.device_count(), steps=4, device="cuda", timeout=120)
    report = verify_scripts(SCRIPTS / "fsdp2.py", SCRIPTS / "fsdp2.py", options)
    assert report.ok, report.findings[0].reason or report.findings[0].diagnosis
    assert report.findings[0].comparison.bit_equal
