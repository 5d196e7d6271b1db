"""Lightning's FSDPStrategy: what the migrated modules are, what is left, and that both train alike on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SCRIPTS, Runner
from test_pairs import assert_alike

from ckptkit import migrate

# Lightning refuses FSDP without a GPU, and FSDP1 itself a CPU that is not named to it; neither matters for the numbers.
ON_CPU = """
import torch
import lightning.fabric.connector as fabric
import lightning.pytorch.trainer.connectors.accelerator_connector as trainer
from torch.distributed.fsdp import FullyShardedDataParallel

fabric._Connector._check_strategy_and_fallback = lambda self: None
trainer._AcceleratorConnector._check_strategy_and_fallback = lambda self: None
_init = FullyShardedDataParallel.__init__


def _on_cpu(self, *args, **kwargs):
    _init(self, *args, **{**kwargs, "device_id": torch.device("cpu")})


FullyShardedDataParallel.__init__ = _on_cpu
"""
FABRIC = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from record import record


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x):
        return x + F.relu(self.up(x))


def main():
    fabric = Fabric(devices=2, strategy=FSDPStrategy(auto_wrap_policy={Block}))
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(nn.Sequential(Block(), Block(), nn.Linear(6, 4)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(1 + fabric.global_rank)
    losses = []
    for _ in range(5):
        loss = F.mse_loss(model(torch.randn(4, 6)), torch.randn(4, 4))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kind = type(model._forward_module).__name__
    assert "FSDP" in kind or "Sharded" in kind, kind
    record(losses, model._forward_module)


if __name__ == "__main__":
    main()
"""
HEAD = """
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
class Block(nn.Module): pass
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def training_step(self, batch, index): ...
    def test_step(self, batch, index): ...
"""


def on_cpu(script: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(ON_CPU + script.read_text())
    return folder / "train.py"


@pytest.mark.slow
def test_a_lightning_module_trains_alike(runner: Runner, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pair = SCRIPTS / "lightning_strategy"
    before = runner.run(on_cpu(pair / "before.py", tmp_path / "a"), timeout=150)
    after = runner.run(pair / "after.py", timeout=150)
    assert_alike(before, after, 0.0)
    # The control: the steps of a module whose root is sharded must be made known, or it does not run at all.
    broken = tmp_path / "broken.py"
    broken.write_text((pair / "after.py").read_text().replace("register_fsdp_forward_method(self, step)", "pass"))
    with pytest.raises(AssertionError, match=r"mixed torch\.Tensor and DTensor"):
        runner.run(broken, timeout=150)


@pytest.mark.slow
def test_a_fabric_loop_trains_alike(runner: Runner, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script = tmp_path / "fabric.py"
    script.write_text(FABRIC)
    before = runner.run(on_cpu(script, tmp_path / "a"), timeout=150)
    assert not migrate.run([script], write=True).manual
    assert "fully_shard(model, mesh=mesh)" in script.read_text()
    assert_alike(before, runner.run(script, timeout=150), 0.0)


@pytest.mark.parametrize(
    ("trainer", "size"),
    [
        ("devices=4", "4"),
        ("devices=4, num_nodes=2", "8"),
        ("devices=[0, 2, 3]", "3"),
        ("devices='0,1'", "2"),
        ("devices='auto'", "torch.cuda.device_count()"),
        ("num_nodes=cli.nodes", "torch.cuda.device_count() * cli.nodes"),
        ("devices=cli.devices", "cli.devices"),
    ],
)
def test_the_mesh_has_the_size_of_the_world(trainer: str, size: str, migrated: Callable) -> None:
    found = migrated(HEAD + f"def main(cli):\n    Trainer({trainer}, strategy=FSDPStrategy()).fit(Net())\n")
    assert f"ModelParallelStrategy(data_parallel_size={size}, tensor_parallel_size=1)" in found.text.replace(
        "\n", ""
    ).replace("    ", "")
    assert not found.report.manual and found.text.count("def configure_model(self):") == 1
    assert 'for step in ("training_step", "test_step"):' in found.text


def test_the_name_of_the_strategy_and_other_packages(migrated: Callable) -> None:
    code = HEAD.replace("from lightning import", "from pytorch_lightning import").replace(
        "from lightning.pytorch.strategies import FSDPStrategy\n", ""
    )
    text = migrated(code + 'Trainer(devices=2, precision="32-true", strategy="fsdp").fit(Net())\n').text
    assert "from pytorch_lightning.strategies import ModelParallelStrategy\n" in text
    assert "strategy=ModelParallelStrategy(data_parallel_size=2" in text and "isinstance(module" not in text


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('Trainer(strategy="fsdp_cpu_offload")', "CPUOffloadPolicy"),
        ("Trainer(precision='bf16-mixed', strategy=FSDPStrategy())", "mp_policy"),
        ("Trainer(strategy=FSDPStrategy(sharding_strategy='NO_SHARD'))", "DDP"),
        ("Trainer(strategy=FSDPStrategy(sharding_strategy='HYBRID_SHARD'))", "mesh of its own"),
        ("Trainer(strategy=FSDPStrategy(auto_wrap_policy=policy))", "no set of classes"),
        ("Trainer(strategy=FSDPStrategy(activation_checkpointing_policy={Block}))", "activation_checkpointing_policy"),
        ("Trainer(strategy=FSDPStrategy(cpu_offload=True))", "CPUOffloadPolicy"),
        ("strategy = FSDPStrategy()", "not in this file"),
    ],
)
def test_what_cannot_be_said_is_left(code: str, said: str, migrated: Callable) -> None:
    found = migrated(HEAD + f"policy = print\n{code}\n")
    assert [said in one.message for one in found.report.manual] == [True], found.report.manual
    assert code in found.text and "configure_model(" not in found.text


def test_a_module_that_configures_itself_is_left(migrated: Callable) -> None:
    code = HEAD + "    def configure_model(self):\n        pass\n\nTrainer(strategy=FSDPStrategy()).fit(Net())\n"
    assert "has a configure_model" in migrated(code).report.manual[0].message


def test_other_strategies_are_none_of_ours(untouched: Callable) -> None:
    untouched(HEAD + 'Trainer(strategy="ddp").fit(Net())\nnames = {"fsdp": 1}\n'.replace("FSDPStrategy", "X"))


def test_a_joint_setup_of_fabric_is_reported(migrated: Callable) -> None:
    code = "from lightning.fabric import Fabric\nf = Fabric(devices=2, strategy='fsdp')\n"
    code += "m, o = f.setup(model, optimizer)\n"
    found = migrated(code)
    assert "parallelize_fn=shard_model" in found.text
    assert ["setup_module(model) first" in one.message for one in found.report.manual] == [True]
