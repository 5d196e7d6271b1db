"""Numbers that are taken from parameters by hand are said, and what stays right is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAD = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(net, x):
    model = DDP(net)
    model(x).sum().backward()
"""
READ = {
    "a norm": "total = 0.0\n    for p in model.parameters():\n        total += p.grad.norm(2).item() ** 2",
    "a sum": "total = sum(p.detach().abs().sum() for p in model.parameters())",
    "a number": "total = [float(p.mean()) for _, p in net.named_parameters()]",
    "a copy": "state = {n: p.detach().cpu() for n, p in model.module.named_parameters() if p.requires_grad}",
    "a vector": "flat = torch.nn.utils.parameters_to_vector(model.parameters())",
    "a view": "flat = torch.cat([p.data.view(-1) for p in model.parameters()])",
}
FINE = {
    "counts": "print(sum(p.numel() for p in model.parameters()))",
    "shapes": "print({n: p.shape.numel() for n, p in model.named_parameters()})",
    "flags": "for p in model.parameters():\n        p.requires_grad_(False)",
    "gathered": "total = sum(p.grad.full_tensor().norm() ** 2 for p in model.parameters())",
    "another model": "total = sum(p.norm() for p in torch.nn.Linear(2, 2).parameters())",
    "other numbers": "for p in model.parameters():\n        print(x.mean().item())",
}


@pytest.mark.parametrize("code", READ.values(), ids=READ)
def test_what_is_read_is_said(code: str, migrated: Callable) -> None:
    found = migrated(f"{HEAD}    {code}\n")
    assert [one.rule for one in found.report.findings if one.grade == "manual"] == ["parameter-reads"]
    assert "TODO(ckptkit): each rank holds a part of this tensor" in found.text


@pytest.mark.parametrize("code", FINE.values(), ids=FINE)
def test_what_stays_right_is_not(code: str, migrated: Callable) -> None:
    assert "manual" not in migrated(f"{HEAD}    {code}\n").grades


def test_a_wrapper_that_getattr_takes_off(migrated: Callable) -> None:
    text = migrated(f"{HEAD}    torch.save(getattr(model, 'module', model).state_dict(), 'a.pt')\n").text
    assert "get_model_state_dict(" in text
