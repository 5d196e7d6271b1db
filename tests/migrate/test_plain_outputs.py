"""Models that answer plain objects: noticed where the program shows it; what FSDP2 does with such objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Runner

MODEL = """
import dataclasses
import collections
import typing
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

{output}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        out = self.linear(x)
        return Output(loss=out.mean(), logits=out)


model = {wrap}(Net())
"""
PLAIN = "class Output:\n    def __init__(self, loss, logits):\n        self.loss, self.logits = loss, logits\n"
FIELDS = "    loss: torch.Tensor\n    logits: torch.Tensor\n"
SEEN = {
    "dataclass": "@dataclasses.dataclass\nclass Output:\n" + FIELDS,
    "named tuple": "class Output(typing.NamedTuple):\n" + FIELDS,
    "namedtuple": "Output = collections.namedtuple('Output', 'loss logits')",
    "dict": "class Output(dict):\n    pass",
    "out of sight": "from elsewhere import Output",
    "dict call": "Output = dict",
}


BESIDE = "model.register_forward_hook(lambda module, inputs, output: (output, vars(output)))\n"
AWAY = "model.register_forward_hook(lambda module, inputs, output: output[0])\n"


@pytest.mark.parametrize("wrap", ["DDP", "FSDP"])
@pytest.mark.parametrize(
    "output", [PLAIN, "class Base(object):\n    pass\n\n" + PLAIN.replace("Output:", "Output(Base):")]
)
def test_a_plain_object_is_shown_with_its_attributes(migrated: Callable, output: str, wrap: str) -> None:
    text = migrated(MODEL.format(output=output, wrap=wrap)).text
    assert text.index(BESIDE) < text.index("fully_shard(model") < text.index(AWAY) and "TODO" not in text


def test_a_namespace_is_shown_with_its_attributes(migrated: Callable) -> None:
    text = migrated(MODEL.format(output="", wrap="DDP").replace("return Output(", "return SimpleNamespace(")).text
    assert BESIDE in text and AWAY in text


def test_slots_are_left_to_a_person(migrated: Callable) -> None:
    slots = PLAIN.replace("Output:\n", "Output:\n    __slots__ = ('loss', 'logits')\n\n")
    found = migrated(MODEL.format(output=slots, wrap="DDP"))
    assert "Net.forward answers Output" in found.text and "hook" not in found.text and "manual" in found.grades


@pytest.mark.parametrize("output", SEEN.values(), ids=SEEN)
def test_what_fsdp2_looks_into_is_not(migrated: Callable, output: str) -> None:
    found = migrated(MODEL.format(output=output, wrap="DDP"))
    assert "manual" not in found.grades and "hook" not in found.text


def test_a_block_that_answers_one_is_noticed(migrated: Callable) -> None:
    code = MODEL.format(output=PLAIN, wrap="FSDP").replace("model = FSDP(Net())", "")
    code += (
        "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n"
        "model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Net}))\n"
    )
    assert "Net.forward answers Output" in migrated(code).text


TRAINS = (
    MODEL
    + """
import os
from record import record
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
torch.manual_seed(1 + dist.get_rank())
losses = []
for _ in range(4):
    loss = model(torch.randn(3, 4)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
record(losses, model)
"""
)


@pytest.mark.slow
def test_gradients_of_a_plain_object_are_reduced_only_with_the_hooks(
    runner: Runner, migrated: Callable, tmp_path: Path
) -> None:
    losses = {}
    for name, output in {"plain": PLAIN, "dataclass": SEEN["dataclass"]}.items():
        code = TRAINS.format(output=output + "\ndist.init_process_group('gloo')\ntorch.manual_seed(0)\n", wrap="DDP")
        text = migrated(code).text
        bare = text.replace(BESIDE, "").replace(AWAY, "")
        assert (bare == text) == (name == "dataclass")
        for kind, script_text in {"ddp": code, "fsdp2": text, "bare": bare}.items():
            script = tmp_path / f"{name}_{kind}.py"
            script.write_text(script_text)
            losses[name, kind] = runner.run(script, cwd=tmp_path)["losses"]
    alike = [losses[name, kind] for name in ("plain", "dataclass") for kind in ("ddp", "fsdp2")]
    assert alike == alike[:1] * 4
    # Without them the loss stays where it was, and nothing is raised.
    assert abs(losses["plain", "bare"][-1] - losses["plain", "ddp"][-1]) > 0.5
