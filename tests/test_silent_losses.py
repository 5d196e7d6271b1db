"""Losses that other tools make without a word, each shown not to happen here, on checkpoints of the real frameworks.

Beside the first stands its control: what the loss does to a training run where it happens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.spec import TensorKey

from .truth import Truth, truth_of

pytestmark = pytest.mark.slow
Fixtures = Callable[[str], Path]
# A source of each kind that can hold them; universal and rank files have the same tests through test_targets.
SOURCES = ("ddp-full", "fsdp1-full", "fsdp2-dcp", "fsdp1-ranks", "zero1", "zero2", "zero3", "universal-zero1",
           "universal-zero3")  # fmt: skip


def losses_after(folder: Path) -> list[float]:
    return json.loads((folder / "continue.json").read_text())["losses"]


def converted(truth: Truth, out: Path, **options: Any) -> Any:
    ckptkit.convert(truth.path, out, model=truth.model, **options)
    return torch.load(out, weights_only=True) if out.is_file() else None


def resumed(pool: Any, path: Path, truth: Truth) -> list[float]:
    """The losses of DDP's next steps after plain torch loaded the file: `optimizer.load_state_dict` and no more."""
    return pool.run("tests.resume_jobs:resume", world_size=2, strategy="ddp", form="full", path=str(path),
                    workload=truth.info["workload"])[0]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["ddp-full", "fsdp1-full", "fsdp2-dcp-ws3", "fsdp1-local", "zero1", "zero2-ws3", "zero3", "universal-zero2",
             "zero1-elastic"],
)  # fmt: skip
def test_optimizer_ids_stay_integers_and_training_goes_on(
    name: str, fixture_dir: Fixtures, tmp_path: Path, pool: Any
) -> None:
    """dcp_to_torch_save turns ids into text (pytorch#153842): the state is there and Adam starts anew."""
    folder = fixture_dir(name)
    truth, out = truth_of(folder), tmp_path / "out.pt"
    content = converted(truth, out, to="full", optimizer_keys="id", prefix="module.")
    ids = [key for group in content["optimizer"]["param_groups"] for key in group["params"]]
    assert ids == list(range(len(ids))) and all(type(key) is int for key in content["optimizer"]["state"])
    if name.endswith("elastic"):
        return  # its groups hold no hyper-parameters: what a run needs is not in the files, and says so
    assert resumed(pool, out, truth) == pytest.approx(losses_after(folder), rel=1e-6)


def test_ids_as_text_start_adam_anew(fixture_dir: Fixtures, tmp_path: Path, pool: Any) -> None:
    """The control: torch loads such a file without an error, and the losses are others."""
    folder = fixture_dir("ddp-full")
    truth, out = truth_of(folder), tmp_path / "out.pt"
    content = converted(truth, out, to="full", optimizer_keys="id", prefix="module.")
    content["optimizer"]["state"] = {str(key): value for key, value in content["optimizer"]["state"].items()}
    torch.save(content, out)
    losses, expected = resumed(pool, out, truth), losses_after(folder)
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)  # the weights are right
    assert losses[-1] != pytest.approx(expected[-1], rel=1e-4)  # the moments are gone
    # And such a file, where another tool wrote it, is read rightly.
    names = [name for group in truth.info["param_groups"] for name in group["params"]]
    assert ckptkit.open(out, param_names=names).read("embedding.weight", "exp_avg").abs().sum() > 0


def special(truth: Truth) -> dict[str, torch.Tensor]:
    """The tensors of the model that are 0-d, integers or booleans."""
    return {
        fqn: tensor
        for (fqn, slot), tensor in truth.tensors.items()
        if slot == "value" and (not tensor.dim() or not tensor.is_floating_point())
    }


@pytest.mark.parametrize("to", ["full", "safetensors", "dcp"])
@pytest.mark.parametrize("name", SOURCES)
def test_scalars_integers_booleans_ties_and_frozen_parameters(
    name: str, to: str, fixture_dir: Fixtures, tmp_path: Path
) -> None:
    """HF consolidation writes 0-d tensors as 0.0 and crashes on integers (pytorch#192485); ties crash or come apart
    (DeepSpeed#8376); zero_to_fp32 drops frozen parameters at ZeRO-1; universal loses buffers."""
    truth = truth_of(fixture_dir(name))
    source = ckptkit.open(truth.path, model=truth.model)
    options = {"optimizer": True} if to == "safetensors" else {}
    ckptkit.convert(truth.path, tmp_path / "out", to=to, model=truth.model, allow_drop=bool(source.drops), **options)
    names = [name for group in truth.info["param_groups"] for name in group["params"]]
    written = ckptkit.open(tmp_path / "out", param_names=names)
    odd = special(truth)
    assert {str(tensor.dtype) for tensor in odd.values()} >= {"torch.int64", "torch.bool"}
    assert any(not tensor.dim() and tensor.is_floating_point() for tensor in odd.values())
    for fqn, tensor in odd.items():
        read = written.read(fqn)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape and torch.equal(read, tensor), fqn
        assert bool((tensor != 0).any()), "a test with zeros would not see zeros"
    assert truth.info["aliases"] and truth.info["frozen"]
    for alias, owner in truth.info["aliases"].items():
        assert torch.equal(written.read(alias), truth.tensors[owner, "value"])
        if to != "dcp":  # DCP keeps both names in full, as torch does
            assert written.aliases[alias] == owner and TensorKey(alias) not in written.entries
    for fqn in truth.info["frozen"]:
        assert torch.equal(written.read(fqn), truth.tensors[fqn, "value"])


def test_bf16_optimizer_is_read(fixture_dir: Fixtures, tmp_path: Path) -> None:
    """zero_to_fp32 says "is not a zero checkpoint" of it."""
    truth = truth_of(fixture_dir("zero1-bf16-optimizer"))
    converted(truth, tmp_path / "out.pt", to="full")
    written = ckptkit.open(tmp_path / "out.pt")
    for (fqn, slot), tensor in truth.best().items():
        assert torch.equal(written.read(fqn, slot), tensor), (fqn, slot)
    assert any(slot == "master" for _, slot in truth.tensors), "the masters are what the target holds"


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("to", ["full", "dcp", "dcp-flat", "safetensors"])
def test_groups_keep_their_hyper_parameters(name: str, to: str, fixture_dir: Fixtures, tmp_path: Path) -> None:
    """Loading ZeRO-3's universal form gives every group the values of the first one."""
    truth = truth_of(fixture_dir(name))
    source = ckptkit.open(truth.path, model=truth.model)
    options: dict[str, Any] = {"safetensors": {"optimizer": True}, "dcp-flat": {"flat_optimizer": True}}.get(to, {})
    ckptkit.convert(truth.path, tmp_path / "out", to=to.partition("-")[0], model=truth.model,
                    allow_drop=bool(source.drops), **options)  # fmt: skip
    written = ckptkit.open(tmp_path / "out", model=truth.model)
    decay = {fqn: group["weight_decay"] for group in written.param_groups for fqn in group["params"]}
    expected = {fqn: group["weight_decay"] for group in truth.info["param_groups"] for fqn in group["params"]}
    assert decay == expected and len(set(expected.values())) == 2
