"""DeepSpeed rules beyond their pairs: controls that fail, configs in all shapes, and what keeps its engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, RunError, Runner
from test_controls import edit, migrated_without
from test_pairs import largest_difference

from ckptkit import migrate

SGD = '"optimizer": {"type": "SGD", "params": {"lr": 0.1}}'
HEAD = "import argparse\nimport json\nimport deepspeed\n"


@pytest.fixture(scope="module")
def originals(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the original of a pair records; run once for all controls of it."""
    known: dict[str, dict[str, Any]] = {}

    def record(pair: str) -> dict[str, Any]:
        if pair not in known:
            known[pair] = runner.run(SCRIPTS / pair / "before.py", cwd=tmp_path_factory.mktemp(pair))
        return known[pair]

    return record


CONTROLS = {
    "no clipping": ("deepspeed_engine", "torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)", "pass"),
    "no division": ("deepspeed_attributes", "loss = loss / 2", "loss = loss * 1"),
    "a second update above the lowest rate": ("deepspeed_engine", "self.last_epoch - 1", "self.last_epoch"),
    "no reduction": ("deepspeed_engine", "gradient_sync((", "gradient_sync(False and ("),
    "weight decay of torch's AdamW": ("deepspeed_initialize", ", weight_decay=0.0", ""),
    "an overflow that lowers the scale at once": ("deepspeed_loss_scale", "window=4)", "window=4, hysteresis=1)"),
    "updates that are not skipped": ("deepspeed_loss_scale", "return not overflow", "return True"),
    "weights that are not rounded": ("deepspeed_precision", ".bfloat16().float()\n", "\n"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "old", "new"), CONTROLS.values(), ids=CONTROLS)
def test_a_missing_line_is_seen(
    pair: str, old: str, new: str, runner: Runner, originals: Callable, tmp_path: Path
) -> None:
    script = tmp_path / "control.py"
    script.write_text(edit(pair, lambda text: text.replace(old, new)))
    assert largest_difference(originals(pair)["weights"], runner.run(script, cwd=tmp_path)["weights"]) > 1e-4


@pytest.mark.slow
def test_without_the_broadcast_ranks_train_a_patchwork(runner: Runner, originals: Callable, tmp_path: Path) -> None:
    script = tmp_path / "control.py"
    script.write_text(
        edit("deepspeed_initialize", lambda s: s.replace("dist.broadcast(tensor.detach(), src=0)", "pass"))
    )
    assert largest_difference(originals("deepspeed_initialize"), runner.run(script, cwd=tmp_path)) > 1e-2


def test_without_the_rule_of_steps_nothing_is_stepped() -> None:
    code = migrated_without("deepspeed-engine", "deepspeed_engine")
    assert "optimizer.step()" not in code


SHAPES = {
    "a dict in the call": (HEAD + f"engine, *_ = deepspeed.initialize(model=net, config={{{SGD}, MICRO}})\n", {}),
    "config_params": (
        HEAD + f"c = {{{SGD}, MICRO}}\nengine, *_ = deepspeed.initialize(model=net, config_params=c)\n",
        {},
    ),
    "a file": (HEAD + 'engine, *_ = deepspeed.initialize(model=net, config="ds.json")\n', {"ds.json": "{JSON}"}),
    "a file that is opened": (
        HEAD + 'with open("conf/ds.json") as f:\n    c = json.load(f)\n'
        "engine, *_ = deepspeed.initialize(model=net, config=c)\n",
        {"conf/ds.json": "{JSON}"},
    ),
    "a default of argparse": (
        HEAD + 'p = argparse.ArgumentParser()\np.add_argument("--deepspeed_config", default="ds.json")\n'
        "args = p.parse_args()\nengine, *_ = deepspeed.initialize(args=args, model=net)\n",
        {"ds.json": "{JSON}"},
    ),
    "a launch line": (
        HEAD + "p = argparse.ArgumentParser()\np = deepspeed.add_config_arguments(p)\nargs = p.parse_args()\n"
        "engine, *_ = deepspeed.initialize(args=args, model=net)\n",
        {"ds.json": "{JSON}", "run.sh": "deepspeed train.py --deepspeed \\\n  --deepspeed_config ds.json\n"},
    ),
    "stores": (
        HEAD + f'c = {{{SGD.replace("0.1", "9")}}}\nc["train_micro_batch_size_per_gpu"] = 4\n'
        'c["optimizer"]["params"]["lr"] = 0.1\nengine, *_ = deepspeed.initialize(model=net, config=c)\n',
        {},
    ),
    "a function of literals": (
        HEAD + f"def get_config():\n    c = {{{SGD.replace('0.1', '9')}}}\n    c['optimizer']['params']['lr'] = 0.1\n"
        "    c.update(train_micro_batch_size_per_gpu=4)\n    return c\n\n\n"
        "engine, *_ = deepspeed.initialize(model=net, config=get_config())\n",
        {},
    ),
    "a function's, changed by its caller": (
        HEAD + f"def get_config():\n    return {{{SGD.replace('0.1', '9')}, 'train_batch_size': 64}}\n\n\n"
        "def main(net, loss):\n    c = get_config()\n    c['optimizer']['params']['lr'] = 0.1\n"
        "    c.update({'train_batch_size': 8})\n    engine, *_ = deepspeed.initialize(model=net, config=c)\n"
        "    return engine\n\n\n"
        "engine = main(net, loss)\n",
        {},
    ),
    "dict() and **": (
        HEAD + f"base = {{{SGD}}}\nc = dict(**base, train_micro_batch_size_per_gpu=4)\n"
        "engine, *_ = deepspeed.initialize(model=net, config=c)\n",
        {},
    ),
    "a function of another file": (
        HEAD + "from conf import get_config\nengine, *_ = deepspeed.initialize(model=net, config=get_config())\n",
        {"conf.py": "def get_config():\n    return {JSON}\n"},
    ),
    "a function that loads": (
        HEAD + "def load(path):\n    with open(path) as f:\n        return json.load(f)\n\n\n"
        'engine, *_ = deepspeed.initialize(model=net, config=load("conf/ds.json"))\n',
        {"conf/ds.json": "{JSON}"},
    ),
    "the first of four": (HEAD + f"engine = deepspeed.initialize(model=net, config={{{SGD}, MICRO}})[0]\n", {}),
    "all four returned": (
        HEAD + f"def build():\n    return deepspeed.initialize(model=net, config={{{SGD}, MICRO}})\n\n\n"
        "engine, optimizer, _, _ = build()\n",
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "others"), SHAPES.values(), ids=SHAPES)
def test_configs_are_read_in_every_shape(code: str, others: dict[str, str], migrated: Callable) -> None:
    micro = '"train_micro_batch_size_per_gpu": 4'
    files = {n: t.replace("JSON", f"{SGD}, {micro}") for n, t in others.items()}
    found = migrated(code.replace("MICRO", micro) + "engine.backward(loss)\nengine.step()\n", others=files)
    left = [f for f in found.report.manual if f.rule != "launch-lines"]
    assert not left, left
    assert "torch.optim.SGD(" in found.text and ", lr=0.1)" in found.text
    assert "torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)" in found.text
    assert "deepspeed." not in found.text and "import deepspeed" not in found.text


KEPT = {
    "built in two ways": ("config=build(args)", "the function build, in more ways than one"),
    "built by a function out of sight": ("config=made(args)", "made(args) is only known at run time"),
    "changed under a condition": ("config=late(args)", "changed on the way: c['gradient_clipping'] = args.clip"),
    "keys of the run": ("config={args.key: 1, MORE}", "keys that are only known at run time"),
    "NVMe": ('config={"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, MORE}', "nvme"),
    "1-bit": ('config={"optimizer": {"type": "OneBitAdam", "params": {}}, MORE}', "OneBitAdam"),
    "autotuning": ('config={"autotuning": {"enabled": true}, MORE}', "autotuning"),
    "curriculum": ('config={"curriculum_learning": {"enabled": true}, MORE}', "curriculum"),
    "mpu": ("mpu=mpu, config={MORE}", "model parallelism"),
    "a scheduler of its own": ('config={"scheduler": {"type": "Mine", "params": {}}, MORE}', "Mine"),
    "auto": ('config={"gradient_clipping": "auto", MORE}', "auto"),
    "a stage of the run": ('config={"zero_optimization": {"stage": args.stage}, MORE}', "run time"),
    "a file that is not there": ('config="nowhere.json"', "nowhere.json"),
}


@pytest.mark.parametrize(("arguments", "reason"), KEPT.values(), ids=KEPT)
def test_what_has_no_counterpart_keeps_its_engine(arguments: str, reason: str, migrated: Callable) -> None:
    given = arguments.replace("MORE", f'"train_batch_size": 4, {SGD}').replace("true", "True")
    if "OneBitAdam" in given:
        given = given.replace(f", {SGD}", "")
    code = HEAD + (
        "def build(args):\n    if args.small:\n        return {'train_batch_size': 4}\n"
        "    return {'train_batch_size': 8}\n\n\n"
        "def late(args):\n    c = {'train_batch_size': 4}\n"
        "    if args.clip:\n        c['gradient_clipping'] = args.clip\n"
        "    return c\n\n\n"
        f"engine, *_ = deepspeed.initialize(model=net, {given})\nengine.backward(loss)\nengine.step()\n"
    )
    found = migrated(code)
    assert "engine.backward(loss)\nengine.step()\n" in found.text and "deepspeed.initialize(" in found.text
    assert any(reason in finding.message for finding in found.report.manual), found.report.manual


def test_the_engine_of_an_object_keeps_its_names_in_the_object(migrated: Callable) -> None:
    config = json.dumps(
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4} | json.loads(f"{{{SGD}}}")
    )
    code = HEAD + (
        "class Trainer:\n    def __init__(self, net):\n"
        f"        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=net, config={config})\n\n"
        "    def fit(self, loss):\n        self.engine.backward(loss)\n        self.engine.step()\n"
    )
    text = migrated(code).text
    assert (
        "        self.engine = net\n        self.optimizer = torch.optim.SGD(self.engine.parameters(), lr=0.1)\n"
        in text
    )
    assert "        self.micro_steps += 1\n        if self.micro_steps % 4 == 0:\n" in text
    assert "            self.optimizer.step()\n" in text


def test_batch_sizes_are_reconciled(migrated: Callable) -> None:
    code = HEAD + (
        f'engine, *_ = deepspeed.initialize(model=net, config={{"train_batch_size": 64, '
        f'"train_micro_batch_size_per_gpu": 2, {SGD}}})\nengine.backward(loss)\nengine.step()\n'
    )
    text = migrated(code).text
    assert "accumulation_steps = 64 // 2 // dist.get_world_size()\n" in text
    assert "(loss / accumulation_steps).backward()\n" in text


def test_clipping_that_is_switched_off_stays_off(migrated: Callable) -> None:
    code = HEAD + (
        f'engine, *_ = deepspeed.initialize(model=net, config={{"train_batch_size": 4, '
        f'"gradient_clipping": 0.0, {SGD}}})\n'
        "engine.backward(loss)\nengine.step()\n"
    )
    assert "clip_grad_norm_" not in migrated(code).text


NO_OPS = {
    "another initialize": "from setup import initialize\nengine, *_ = initialize(model=net)\nengine.step()\n",
    "a string": 'NAME = "deepspeed"\nprint(f"train with {NAME}")\n',
    "a Trainer's argument": 'args = TrainingArguments(deepspeed="ds.json")\n',
    "methods of other objects": "import torch\n# not deepspeed\nscaler.step(optimizer)\nloss.backward()\n",
}


@pytest.mark.parametrize("code", NO_OPS.values(), ids=NO_OPS)
def test_what_is_not_an_engine_stays(code: str, untouched: Callable) -> None:
    untouched(code)


def test_a_config_of_its_function_speaks_of_the_run_in_the_callers_words(migrated: Callable) -> None:
    code = HEAD + (
        "def get_config(options, rate):\n"
        "    return {'train_micro_batch_size_per_gpu': 2, 'gradient_accumulation_steps': options.steps,\n"
        "            'optimizer': {'type': 'SGD', 'params': {'lr': rate * 2}}, 'gradient_clipping': options.clip}\n\n\n"
        "engine, *_ = deepspeed.initialize(model=net, config=get_config(args, args.lr))\n"
        "engine.backward(loss)\nengine.step()\n"
    )
    found = migrated(code)
    assert not found.report.manual, found.report.manual
    assert "torch.optim.SGD(engine.parameters(), lr=args.lr * 2)" in found.text
    assert "accumulation_steps = args.steps\n" in found.text and "max_norm = args.clip\n" in found.text


def test_what_else_a_config_says_is_named(migrated: Callable) -> None:
    rest = '"steps_per_print": 10, "tensorboard": {"enabled": True}, "wandb": {"enabled": False}, "mine": 3'
    found = migrated(
        HEAD + f'engine, *_ = deepspeed.initialize(model=net, config={{"train_batch_size": 4, {SGD}, {rest}}})\n'
    )
    assert "deepspeed.initialize" not in found.text
    assert {f.message.partition(":")[0] for f in found.report.manual} == {"tensorboard", "the config's mine"}
    assert any("without meaning for FSDP2: steps_per_print, wandb" in f.message for f in found.report.findings)


RESUME = (SCRIPTS.parent / "programs" / "deepspeed_resume" / "before" / "train.py").read_text()
SCHEDULE = """"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 12, "warmup_type": "linear"},"""
CYCLE = '{"cycle_min_lr": 0.001, "cycle_max_lr": 0.03, "cycle_first_step_size": 3, "decay_step_size": 1}'
MICRO = '"train_micro_batch_size_per_gpu": 4'
STEP = "        engine.step()\n"
# Changes of one program that trains for real, and the number of ranks.
ALIKE: dict[str, tuple[dict[str, str], int]] = {
    "cosine": ({SCHEDULE: '"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}'}, 2),
    "range test": ({SCHEDULE: '"type": "LRRangeTest", "params": {"lr_range_test_step_size": 3}'}, 2),
    "one cycle": ({SCHEDULE: f'"type": "OneCycle", "params": {CYCLE}'}, 2),
    "hpZ": ({'"stage": 2': '"stage": 3, "zero_hpz_partition_size": 2'}, 4),
    "batch sizes": ({MICRO: '"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4'}, 2),
    "no_sync": (
        {
            MICRO: MICRO + ', "gradient_accumulation_steps": 2',
            '"stage": 2': '"stage": 1',
            "        engine.backward(loss)\n": "        with engine.no_sync() if step % 2 == 0 else nullcontext():\n"
            "            engine.backward(loss)\n",
            "import argparse\n": "import argparse\nfrom contextlib import nullcontext\n",
            STEP: "        if step % 2:\n            engine.step()\n",
        },
        2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "world"), ALIKE.values(), ids=ALIKE)
def test_a_program_trains_alike(changes: dict[str, str], world: int, runner: Runner, tmp_path: Path) -> None:
    text = RESUME
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    old, new = tmp_path / "old.py", tmp_path / "train.py"
    old.write_text(text)
    new.write_text(text)
    report = migrate.run([new], write=True)
    assert not report.manual, report.manual
    before, after = (runner.run(path, cwd=tmp_path, world=world, timeout=120) for path in (old, new))
    assert largest_difference(before, after) <= 1e-5
    if "scheduler" not in text or SCHEDULE in text:
        return
    late = tmp_path / "late.py"  # the control: no update of the schedule
    late.write_text(new.read_text().replace("scheduler.step()", "pass"))
    assert largest_difference(before["losses"], runner.run(late, cwd=tmp_path, world=world)["losses"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "old", "new"),
    [
        ("deepspeed_gathered", "    put_back(engine.head.bias, whole_bias, 0)\n", ""),
        ("deepspeed_gathered", "parameter.detach().full_tensor()", "parameter.detach().to_local()"),
        ("deepspeed_gathered", "if dist.get_rank() == 0 else {}", "if False else {}"),
        ("deepspeed_runtime", "torch.manual_seed(seed % 2**63)", "torch.manual_seed(1)"),
        ("deepspeed_accelerator", "engine.parameters(), 0.5)", "engine.parameters(), 1.0)"),
    ],
    ids=["not put back", "a shard read", "weights not loaded", "another seed", "another clipping"],
)
def test_what_is_left_out_around_the_engine_is_seen(
    pair: str, old: str, new: str, runner: Runner, originals: Callable, tmp_path: Path
) -> None:
    script = tmp_path / "control.py"
    script.write_text(edit(pair, lambda text: text.replace(old, new)))
    try:
        found = runner.run(script, cwd=tmp_path)
    except RunError:
        return
    assert largest_difference(originals(pair), found) > 1e-4
