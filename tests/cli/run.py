"""Runs the command line in this process: exit code, stdout, stderr; and small checkpoints for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptkit.cli.main import main


@dataclass(frozen=True)
class Result:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its one JSON object. Infinities and NaN would be no JSON."""

        def refuse(text: str) -> None:
            raise ValueError(f"{text} is no JSON")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def error(self) -> dict[str, str]:
        """The lines of an error by their labels."""
        lines = [line.partition(": ") for line in self.err.splitlines() if not line.startswith("  - ")]
        return {label: text for label, _, text in lines}


def ckptkit(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    capsys.readouterr()
    code = main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return Result(int(code), out, err)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2, bias=False))


def checkpoint(path: Path, **more: Any) -> Path:
    """A plain loop's file: model, AdamW with two groups, scheduler, step."""
    net = model()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(3):
        net(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**content, "step": 3, **more}, path)
    return path
