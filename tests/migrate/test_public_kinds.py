"""Kinds of failure that public training programs showed, each as a small program in words of our own."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.migrate import engine
from ckptkit.migrate.ranks import asks_each_node, is_rank_test

STALE = {
    "a list that an object keeps": """
        class Masters:
            def __init__(self, model):
                self.masters = list(model.parameters())
        def main(net, dist):
            trainer = Masters(net)
            net = DDP(net)
            return net, AdamW(trainer.masters)
        main(build(), dist)
        """,
    "an optimizer of what nobody sees": """
        def main(net, trainer):
            optimizer = AdamW(trainer.masters)
            net = DDP(net)
            return net, optimizer
        """,
    "a copy that is updated from the shards": """
        def main(net):
            ema = copy.deepcopy(net).eval()
            net = DDP(net)
            update(ema, net.module)
        """,
}
FRESH = {
    "names and counts": """
        def main(net):
            names = [name for name, _ in net.named_parameters()]
            count = sum(p.numel() for p in net.parameters())
            net = DDP(net)
            print(names, count)
        """,
    "a list that moves with its optimizer": """
        def main(net):
            params = [p for p in net.parameters() if p.requires_grad]
            optimizer = AdamW(params)
            net = DDP(net)
            return net, optimizer
        """,
    "a reference model of its own": """
        def main(net, batch):
            reference = copy.deepcopy(net).eval()
            net = DDP(net)
            return net(batch) - reference(batch)
        """,
}
HEAD = "import copy\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nfrom torch.optim import AdamW\n"


@pytest.mark.parametrize("code", STALE.values(), ids=STALE.keys())
def test_what_would_stay_behind_is_said(code: str, migrated: Callable) -> None:
    found = migrated(HEAD + textwrap.dedent(code))
    assert [f.rule for f in found.report.manual if f.rule in ("optimizer-order", "model-copies")]
    assert "# TODO(ckptkit): " in found.text


@pytest.mark.parametrize("code", FRESH.values(), ids=FRESH.keys())
def test_what_does_no_harm_is_not(code: str, migrated: Callable) -> None:
    found = migrated(HEAD + textwrap.dedent(code))
    assert "fully_shard(net)" in found.text
    assert not [f for f in found.report.manual if f.rule in ("optimizer-order", "model-copies")]


def test_the_copy_of_a_sharded_model_is_saved_like_it(migrated: Callable) -> None:
    code = """
        def main(net, torch, dist):
            net = DDP(net)
            ema = copy.deepcopy(net)
            if dist.get_rank() == 0:
                torch.save(ema.state_dict(), "ema.pt")
        """
    found = migrated(HEAD + textwrap.dedent(code))
    assert "get_model_state_dict(ema, " in found.text and "ema.state_dict()" not in found.text
    assert not found.report.manual


LEFT = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType\n"


def test_what_a_wrap_that_stays_needs_stays_with_it(migrated: Callable) -> None:
    code = """
        def build(net, options, sharded):
            if sharded:
                model = FSDP(net, **options)
            else:
                model = DDP(net)
            return model
        def save(torch, model, optimizer):
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                torch.save(model.state_dict(), "model.pt")
            print(model.module)
        def load(model, optimizer, state):
            flat = FSDP.optim_state_dict_to_load(state, model, optimizer)
            optimizer.load_state_dict(flat)
        model = build(net(), options(), True)
        save(torch, model, AdamW(model.parameters()))
        load(model, AdamW(model.parameters()), {})
        """
    found = migrated(LEFT + HEAD + textwrap.dedent(code))
    assert "torch.save(model.state_dict()" in found.text and "with FSDP.state_dict_type(" in found.text
    assert "flat = FSDP.optim_state_dict_to_load(state, model, optimizer)" in found.text
    assert [f.rule for f in found.report.manual if f.rule == "wrapped-module"]


def test_a_policy_stays_for_the_wrap_that_may_take_it(migrated: Callable) -> None:
    code = """
        class Config:
            @property
            def precision(self):
                return MixedPrecision(param_dtype=half)
        def build(net, config):
            return FSDP(net, mixed_precision=config.precision)
        """
    found = migrated(LEFT + textwrap.dedent(code))
    assert "return MixedPrecision(param_dtype=half)" in found.text and "TODO" not in found.text
    assert "fully_shard(net, mp_policy=policy_of(config.precision, root=True))" in found.text


def test_enable_wrap_stays_with_a_wrap_that_stays(migrated: Callable) -> None:
    code = """
        from torch.distributed.fsdp.wrap import enable_wrap, wrap
        def build(net, options):
            with enable_wrap(wrapper_cls=FSDP, **options):
                net.layer = wrap(net.layer)
                net = wrap(net)
            return net
        """
    found = migrated(LEFT + textwrap.dedent(code))
    assert "with enable_wrap(wrapper_cls=FSDP, **options):" in found.text and "net = wrap(net)" in found.text
    assert found.report.manual


OWN = """
        class Net(nn.Module):
            def groups(self, rate):
                decayed = [p for name, p in self.named_parameters() if p.dim() > 1]
                return AdamW([{"params": decayed, "lr": rate}])
        def main(rank, path, resumed):
            state = torch.load(path)
            net = Net()
            optimizer = net.groups(0.1)
            if resumed:
                optimizer.load_state_dict(state["optimizer"])
            state = None
            rate = 0.1
            net = DDP(net)
            net(path).backward()
            if rank == 0:
                torch.save(optimizer.state_dict(), path)
        """


def test_what_is_bound_anew_moves_behind_what_reads_it(migrated: Callable) -> None:
    text = migrated("import torch\nfrom torch import nn\n" + HEAD + textwrap.dedent(OWN)).text
    assert text.index("fully_shard(net)") < text.index('state["optimizer"]') < text.index("state = None")
    assert text.index("rate = 0.1\n") < text.index("fully_shard(net)")


def test_an_optimizer_of_the_models_own_method_is_saved_and_loaded_whole(migrated: Callable) -> None:
    text = migrated("import torch\nfrom torch import nn\n" + HEAD + textwrap.dedent(OWN)).text
    assert "optimizer.load_state_dict(" not in text and "optimizer.state_dict()" not in text
    assert text.index("optimizer_state = get_optimizer_state_dict(") < text.index("if rank == 0:")


@pytest.mark.parametrize(
    ("test", "asks", "of_node"),
    [
        ("self.gpu_id == 0 and epoch % self.save_every == 0", True, True),
        ("epoch % 5 == 0 and args.gpu == 0", True, True),
        ("RANK in {-1, 0}", True, False),
        ("args.local_rank in [-1, 0]", True, True),
        ("dist.get_rank() in (0, -1)", True, False),
        ("n_gpu == 0", False, False),
        ("gpu_id == 1", False, False),
        ("rank in (0, 1)", False, False),
    ],
)
def test_a_test_for_one_rank_is_told_by_its_text(test: str, asks: bool, of_node: bool) -> None:
    assert is_rank_test(test) is asks and (asks_each_node(test) and asks) is of_node


def test_an_object_of_one_rank_cannot_gather(migrated: Callable) -> None:
    code = """
        class Average:
            def update(self, model):
                self.state = model.module.state_dict()
        def main(net, rank):
            net = DDP(net)
            average = Average() if rank in (-1, 0) else None
            if average:
                average.update(net)
        """
    found = migrated(HEAD + textwrap.dedent(code))
    assert ["all ranks must call update" in f.message for f in found.report.manual] == [True]


def test_an_optimizer_of_groups_that_a_walk_over_the_modules_fills_is_the_models(migrated: Callable) -> None:
    code = """
        class Net(nn.Module):
            pass
        def build(model):
            decayed, rest = [], []
            for part in model.modules():
                for name, p in part.named_parameters(recurse=False):
                    (rest if name == "bias" else decayed).append(p)
            return AdamW([{"params": decayed}, {"params": rest}])
        def main(state):
            net = DDP(Net())
            optimizer = build(net)
            net(state).backward()
            optimizer.load_state_dict(state)
        """
    assert "set_optimizer_state_dict(" in migrated("from torch import nn\n" + HEAD + textwrap.dedent(code)).text


def test_an_optimizer_is_not_asked_of_a_copy(migrated: Callable) -> None:
    code = """
        def main(net, state):
            net = DDP(net)
            average = copy.deepcopy(net)
            optimizer = AdamW(net.parameters())
            net(state).backward()
            average.eval()
            optimizer.load_state_dict(state)
        """
    assert "named_state(net, optimizer, state)" in migrated(HEAD + textwrap.dedent(code)).text


GATHERED = """
        import deepspeed
        def read(param):
            with deepspeed.zero.GatheredParameters([param]):
                param = param.data.clone()
            return param
        """
ENGINE = """
        def main(net):
            engine, *_ = deepspeed.initialize(model=net, config={"train_batch_size": 8, "optimizer": {"type": "Adam"}})
            print(read(engine.module.weight))
        """


def test_a_gathered_parameter_keeps_the_name_that_it_is_bound_to(migrated: Callable) -> None:
    text = migrated(textwrap.dedent(GATHERED) + textwrap.dedent(ENGINE)).text
    assert "    param = whole_param.data.clone()\n    return param" in text


def test_parameters_of_an_engine_out_of_sight_stay(migrated: Callable) -> None:
    found = migrated(textwrap.dedent(GATHERED))
    assert "with deepspeed.zero.GatheredParameters([param]):" in found.text and found.report.manual


def test_a_state_dict_type_for_what_is_out_of_sight_stays(migrated: Callable) -> None:
    code = """
        def save(trainer):
            with FSDP.state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT):
                trainer.save_model()
        """
    found = migrated(LEFT + textwrap.dedent(code))
    assert "with FSDP.state_dict_type(" in found.text
    assert [f.rule for f in found.report.manual] == ["model-state-dict"]


@pytest.mark.parametrize(
    ("wrapped", "norm"), [("net = DDP(net)", ".full_tensor()"), ("if ddp: net = DDP(net)", "whole(")]
)
def test_the_norm_of_a_model_that_may_be_plain_is_asked_what_it_is(wrapped: str, norm: str, migrated: Callable) -> None:
    code = f"""
        class Net(torch.nn.Module):
            pass
        def main(ddp):
            net = Net()
            {wrapped}
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            print(float(norm))
        """
    text = migrated("import torch\n" + HEAD + textwrap.dedent(code)).text
    (line,) = [line for line in text.splitlines() if "clip_grad_norm_" in line]
    assert norm in line and line.count("whole(") + line.count(".full_tensor()") == 1


def test_another_name_of_the_scaler_becomes_one_of_its_heir(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\nScaler = ShardedGradScaler\n"
    )
    (tmp_path / "train.py").write_text("from tools import Scaler\n\nscaler = Scaler()\n")
    report = engine.run([str(tmp_path)], write=True)
    assert "Scaler = torch.amp.GradScaler" in (tmp_path / "tools.py").read_text()
    assert not report.manual and not engine.run([str(tmp_path)]).changed


def test_a_loop_that_unwraps_ends(migrated: Callable) -> None:
    code = """
        def first(model):
            while isinstance(model, DDP):
                model = model.module
            return model
        def second(model):
            while hasattr(model, "module"):
                model = model.module
            return model
        def third(model):
            while isinstance(model, (DDP, Half)):
                model = model.module
            return model
        def main(net):
            net = DDP(net)
            return first(net), second(net), third(net)
        """
    found = migrated("from half import Half\n" + HEAD + textwrap.dedent(code))
    assert "while isinstance(model, FSDPModule):" not in found.text and "model = model\n" not in found.text
    assert [f.rule for f in found.report.manual] == ["wrapped-module"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.save(net.module.head.state_dict(), path)", True),
        ("torch.save({k: getattr(net.module, k).state_dict() for k in keys}, path)", True),
        ("net.module.layers[0].load_state_dict(torch.load(path))", True),
        ("net.module.save_pretrained(path)", True),
        ("net.module.save_pretrained(path, state_dict=state)", False),
        ("torch.save(net.module.state_dict(), path)", False),
        ("torch.save(schedule.state_dict(), path)", False),
    ],
)
def test_the_state_of_a_part_is_said(line: str, said: bool, migrated: Callable) -> None:
    code = f"""
        def main(net, path, keys, state, schedule):
            net = DDP(net)
            {line}
        """
    found = migrated("import torch\n" + HEAD + textwrap.dedent(code))
    assert bool([f for f in found.report.manual if f.rule == "model-state-dict"]) is said
