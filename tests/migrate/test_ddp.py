"""DDP rules beyond their pairs: controls that fail, what stays, what is left to a person, old checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SCRIPTS, RunError, Runner
from test_controls import difference, edit, migrated_without
from test_pairs import largest_difference

IMPORT = (
    "import torch\nimport torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
)


@pytest.mark.slow
def test_without_the_broadcast_ranks_train_a_patchwork(runner: Runner, tmp_path: Path) -> None:
    assert difference(runner, tmp_path, "ddp_broadcast", migrated_without("ddp-broadcast", "ddp_broadcast")) > 1e-2


@pytest.mark.slow
def test_an_optimizer_that_stays_before_the_sharding_trains_nothing(runner: Runner, tmp_path: Path) -> None:
    assert difference(runner, tmp_path, "ddp_devices", migrated_without("optimizer-order", "ddp_devices")) > 1e-3


@pytest.mark.slow
def test_an_optimizer_that_keeps_the_old_parameters_trains_nothing(runner: Runner, tmp_path: Path) -> None:
    pair = SCRIPTS / "optimizer_rebound"
    for name in ("whole", "same", "without", "stateless"):
        (tmp_path / name).mkdir()  # each with a snapshot of its own
    whole = runner.run(pair / "before.py", cwd=tmp_path / "whole")
    assert largest_difference(whole, runner.run(pair / "after.py", cwd=tmp_path / "same")) == 0.0

    def control(name: str, old: str, new: str) -> Path:
        script = tmp_path / name / "control.py"
        script.write_text(edit("optimizer_rebound", lambda text: text.replace(old, new)))
        return script

    without = control("without", "        rebind(optimizer, names, self.model)\n", "")
    with pytest.raises(RunError, match="KeyError"):  # saving finds parameters that the model does not have
        runner.run(without, cwd=without.parent)
    stateless = control("stateless", "            if state:\n", "            if False:\n")
    assert largest_difference(whole["losses"], runner.run(stateless, cwd=stateless.parent)["losses"]) > 1e-4


@pytest.mark.slow
def test_without_the_hook_each_rank_evaluates_with_its_own_statistics(runner: Runner, tmp_path: Path) -> None:
    assert difference(runner, tmp_path, "ddp_buffers", migrated_without("ddp-buffers", "ddp_buffers")) > 1e-4


@pytest.mark.slow
def test_a_missing_clip_is_seen(runner: Runner, tmp_path: Path) -> None:
    code = edit("ddp_clipping", lambda s: s.replace("torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)", "pass"))
    assert difference(runner, tmp_path, "ddp_clipping", code) > 1e-3


@pytest.mark.slow
def test_the_migrated_program_resumes_from_a_ddp_checkpoint(runner: Runner, tmp_path: Path) -> None:
    pair = SCRIPTS / "ddp_optimizer_state"
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    whole = runner.run(pair / "before.py", cwd=old)
    resumed = runner.run(pair / "after.py", cwd=new, env={"RESUME": str(old / "checkpoint.pt")})
    assert largest_difference(whole, resumed) == 0.0
    # The control: with the optimizer's state left out the losses part.
    control = tmp_path / "control.py"
    control.write_text(
        (pair / "after.py").read_text().replace("    set_optimizer_state_dict(", "    (lambda *a, **k: 0)(")
    )
    lost = runner.run(control, cwd=new, env={"RESUME": str(old / "checkpoint.pt")})
    assert largest_difference(whole["losses"], lost["losses"]) > 1e-4


NO_OPS = {
    "a class of the program": """
        class DistributedDataParallel:
            def __init__(self, module): self.module = module
        model = DistributedDataParallel(object())
        print(model.module.weight)
        """,
    "DataParallel": """
        import torch
        model = torch.nn.DataParallel(net)
        print(model.module.state_dict())
        """,
    "only the functions of nn.parallel": """
        from torch.nn.parallel import parallel_apply
        outputs = parallel_apply(replicas, inputs)
        """,
    "in a string": """
        HELP = "wraps with torch.nn.parallel.DistributedDataParallel"
        """,
    "a line that is skipped": """
        from torch.nn.parallel import DistributedDataParallel as DDP
        model = DDP(net)  # ckptkit: skip
        """,
}


@pytest.mark.parametrize("code", NO_OPS.values(), ids=NO_OPS)
def test_what_is_not_ddp_stays(code: str, untouched: Callable) -> None:
    untouched(code)


def test_an_import_of_the_class_alone_stays(untouched: Callable) -> None:
    untouched("from torch.nn.parallel import DistributedDataParallel as DDP\n\nprint(1)\n")


def test_join_leaves_the_model_and_all_its_uses(migrated: Callable) -> None:
    code = IMPORT + "model = DDP(net)\nwith model.join():\n    model.module.step()\n"
    found = migrated(code)
    assert "model = DDP(net)\n" in found.text and "model.module.step()" in found.text
    assert [f.rule for f in found.report.manual] == ["ddp-join"]


def test_evaluating_on_rank_0_alone_is_reported(migrated: Callable) -> None:
    code = IMPORT + (
        "def evaluate(model):\n    return model(1)\n\n\nmodel = DDP(net)\n"
        "if dist.get_rank() == 0:\n    evaluate(model)\n"
    )
    found = migrated(code)
    assert [(f.rule, f.line) for f in found.report.manual] == [("ddp-rank-guards", 10)]
    assert "    # TODO(ckptkit): all ranks must run this" in found.text


def test_a_function_that_saves_is_reported_where_only_rank_0_calls_it(migrated: Callable) -> None:
    code = IMPORT + (
        "def save(model):\n    print('saving')\n    torch.save(model.module.state_dict(), 'x.pt')\n\n\n"
        "model = DDP(net)\n"
        "if dist.get_rank() == 0:\n    save(model)\n"
    )
    found = migrated(code)
    assert [(f.rule, f.line) for f in found.report.manual] == [("model-state-dict", 11)]


def test_unused_parameters_are_graded_numerics(migrated: Callable) -> None:
    found = migrated(IMPORT + "model = DDP(net, find_unused_parameters=True)\n")
    assert "net.set_reduce_scatter_unused_params(True)\n" in found.text
    assert [f.rule for f in found.report.findings if f.grade.value == "numerics"] == ["ddp-unused-parameters"]


def test_compiled_before_or_after(migrated: Callable) -> None:
    found = migrated(
        IMPORT + "model = torch.compile(DDP(net))\nother = DDP(torch.compile(net2))\nmodel.module.eval()\n"
    )
    assert "model = torch.compile(net)\n" in found.text and "fully_shard(other)\n" in found.text
    assert "DDP" not in found.text and "model.eval()" in found.text


def test_sync_batch_norm_keeps_its_place_and_needs_no_hook(migrated: Callable) -> None:
    found = migrated(IMPORT + "net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)\nmodel = DDP(net)\n")
    assert found.text.index("convert_sync_batchnorm") < found.text.index("fully_shard(net)")
    assert "register_forward_pre_hook" not in found.text


def test_compressing_hooks_become_the_dtype_of_the_reduction(migrated: Callable) -> None:
    code = IMPORT + (
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "model = DDP(net)\nmodel.register_comm_hook(None, default_hooks.bf16_compress_hook)\n"
    )
    found = migrated(code)
    assert "reduce_dtype" in found.text or found.report.manual


def test_lists_of_parameters_move_with_their_optimizer(migrated: Callable) -> None:
    code = IMPORT + (
        "decay = [p for p in net.parameters() if p.ndim > 1]\nrest = []\nfor p in net.parameters():\n"
        "    if p.ndim < 2:\n        rest.append(p)\nmodel = DDP(net)\n"
        "optimizer = torch.optim.SGD([{'params': decay}, {'params': rest}], lr=0.1)\n"
    )
    text = migrated(code).text
    order = [text.index(part) for part in ("fully_shard(net)", "decay = ", "rest.append(p)", "optimizer = ")]
    assert order == sorted(order)


def test_two_models_move_two_optimizers(migrated: Callable) -> None:
    code = IMPORT + (
        "one = torch.optim.SGD(a.parameters(), lr=0.1)\ntwo = torch.optim.SGD(b.parameters(), lr=0.1)\n"
        "a = DDP(a)\nb = DDP(b)\n"
    )
    text = migrated(code).text
    assert text.index("fully_shard(a)") < text.index("one = ") and text.index("fully_shard(b)") < text.index("two = ")


def test_an_optimizer_of_a_builder_out_of_sight_moves_too(migrated: Callable) -> None:
    code = IMPORT + "optimizer = net.configure_optimizers(0.1, lr)\nif distributed:\n    net = DDP(net)\n"
    text = migrated(code).text
    assert text.index("fully_shard(net)") < text.index("configure_optimizers")


TRAINER = IMPORT + (
    "class Net(torch.nn.Module):\n    pass\n\n\ndef make(model):\n"
    "    return torch.optim.SGD([{'params': list(model.parameters())}], lr=0.1)\n\n\n"
    "class Trainer:\n    def __init__(self, model, optimizer):\n        self.model, self.optimizer = model, optimizer\n"
    "        self.load()\n        self.model = DDP(self.model)\n\n"
    "    def load(self):\n        self.optimizer.load_state_dict(torch.load('x.pt'))\n\n"
    "    def save(self):\n        torch.save(self.optimizer.state_dict(), 'x.pt')\n\n\n"
    "def main():\n    model = Net()\n    optimizer = make(model)\n    Trainer(model, optimizer).save()\n\n\nmain()\n"
)


def test_an_optimizer_that_is_handed_over_is_rebound_and_its_state_gathered(migrated: Callable) -> None:
    found = migrated(TRAINER)
    assert not found.report.manual, found.report.manual
    text = found.text
    order = [
        text.index(part) for part in ("names = {", "fully_shard(self.model)", "rebind(optimizer, names, self.model)")
    ]
    assert order == sorted(order)
    assert "get_optimizer_state_dict(" in text and "set_optimizer_state_dict(" in text
    assert "self.optimizer.state_dict()" not in text and "self.optimizer.load_state_dict(" not in text


def test_an_optimizer_that_cannot_move_is_reported(migrated: Callable) -> None:
    code = IMPORT + (
        "class Net(torch.nn.Module):\n    pass\n\n\nclass Trainer:\n    def __init__(self, model, parts):\n"
        "        self.model, self.parts = DDP(model), parts\n\n\n"
        "def main():\n    model = Net()\n    Trainer(model, [torch.optim.SGD(model.parameters(), 0.1)])\n\n\nmain()\n"
    )
    found = migrated(code)
    assert [(f.rule, f.line) for f in found.report.manual] == [("optimizer-order", 15)]


def test_what_a_moved_optimizer_reads_is_not_taken_away_before_it(migrated: Callable) -> None:
    code = IMPORT + (
        "checkpoint = torch.load('x.pt')\noptimizer = net.configure_optimizers(lr)\nif resume:\n"
        "    optimizer.load_state_dict(checkpoint['optimizer'])\ncheckpoint = None\nnet = torch.compile(net)\n"
        "if distributed:\n    net = DDP(net)\nprint(checkpoint)\nnet.eval()\n"
        "torch.save(optimizer.state_dict(), 'x.pt')\n"
    )
    text = migrated(code).text
    parts = ("torch.compile(net)", "fully_shard(net)", "net.configure_optimizers(lr)", "set_optimizer_state_dict(")
    order = [text.index(part) for part in (*parts, "checkpoint = None", "print(checkpoint)")]
    assert order == sorted(order), text
    assert "optimizer.state_dict()" not in text  # it holds shards: get_optimizer_state_dict


def test_what_a_guard_asks_for_besides_the_rank_still_guards_the_gathering(migrated: Callable) -> None:
    code = IMPORT + (
        "model = DDP(net)\nfor step in range(9):\n    if step % 3 == 0 and dist.get_rank() == 0:\n"
        "        torch.save(model.module.state_dict(), 'x.pt')\n"
    )
    assert "    if step % 3 == 0:\n        model_state = get_model_state_dict(" in migrated(code).text


def test_the_rank_within_a_node_is_a_guard(migrated: Callable) -> None:
    code = IMPORT + (
        "model = DDP(net)\nif not many or (many and args.rank % n_gpus == 0):\n    save({'m': model.state_dict()})\n"
    )
    text = migrated(code).text
    assert text.index("get_model_state_dict(model") < text.index("if not many")


def test_parameters_that_a_hook_of_the_program_reduced_are_said(migrated: Callable) -> None:
    found = migrated(
        IMPORT + "model = DDP(net, delay_all_reduce_named_params=[('w', net.w)], param_to_hook_all_reduce=net.w)\n"
    )
    assert "fully_shard(net)" in found.text
    assert {f.rule for f in found.report.manual} == {"ddp-retired-arguments"} and len(found.report.manual) == 2
