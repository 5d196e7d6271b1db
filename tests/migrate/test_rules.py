"""Rules on small snippets: the variants that the pairs leave out, and mostly what must stay as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAD = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch, CPUOffload, FullStateDictConfig, FullyShardedDataParallel as FSDP, MixedPrecision,
    ShardingStrategy, StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
"""


def body(text: str) -> str:
    """What follows the imports (and helpers) of a migrated snippet."""
    return text[text.index("# here") :]


@pytest.fixture
def rewritten(migrated: Callable) -> Callable[..., str]:
    def run(code: str, **options: object) -> str:
        found = migrated(HEAD + "# here\n" + code, **options)
        compile(found.text, "train.py", "exec")
        return body(found.text)

    return run


def test_hybrid_shards_within_a_node(rewritten: Callable) -> None:
    text = rewritten("model = FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)\n")
    assert '    mesh=init_device_mesh(\n        "' in text and "\n    ),\n)\n" in text  # broken as ruff would
    assert "(dist.get_world_size() // torch.cuda.device_count(), torch.cuda.device_count())" in text
    assert 'mesh_dim_names=("replicate", "shard")' in text and "reshard_after_forward" not in text
    text = rewritten("model = FSDP(model, sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)\n")
    assert "reshard_after_forward=False" in text


def test_a_default_is_not_taken_for_the_value(rewritten: Callable) -> None:
    text = rewritten(
        "def build(model, strategy=ShardingStrategy.FULL_SHARD, mixed=MixedPrecision(param_dtype=torch.bfloat16)):\n"
        "    return FSDP(model, sharding_strategy=strategy, mixed_precision=mixed)\n"
    )
    assert "**sharding_of(strategy)" in text and "mp_policy=mixed" in text
    assert "mixed=MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in text


def test_a_group_that_may_be_none_is_that_of_all_ranks(rewritten: Callable) -> None:
    text = rewritten("model = FSDP(model, process_group=group if split else None)\n")
    assert 'mesh=DeviceMesh.from_group((group if split else None) or dist.group.WORLD, "cuda")' in text


def test_the_pair_of_a_hybrid_group_becomes_a_mesh(rewritten: Callable) -> None:
    text = rewritten("model = FSDP(model, process_group=(a, b), sharding_strategy=ShardingStrategy.HYBRID_SHARD)\n")
    assert text == '# here\nfully_shard(model, mesh=hybrid_mesh((a, b), "cuda"))\n'
    text = rewritten("model = FSDP(model, process_group=pg, sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2)\n")
    assert text == '# here\nfully_shard(model, mesh=hybrid_mesh(pg, "cuda"), reshard_after_forward=False)\n'


def test_groups_that_are_chosen_with_their_strategy_are_asked_with_it(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model, process_group=(a, b) if far else None, sharding_strategy="
        "ShardingStrategy.HYBRID_SHARD if far else ShardingStrategy.SHARD_GRAD_OP)\n"
    )
    assert "sharding_of(" in text and "group=(" in text and "(a, b) if far else None" in text


@pytest.mark.parametrize("offload", ["None", "CPUOffload()", "CPUOffload(offload_params=False)", "CPUOffload(False)"])
def test_no_offload_needs_no_argument(rewritten: Callable, offload: str) -> None:
    assert rewritten(f"model = FSDP(model, cpu_offload={offload})\n") == "# here\nfully_shard(model)\n"


def test_a_set_device_is_added_only_where_there_is_none(rewritten: Callable) -> None:
    text = rewritten("model = FSDP(model, device_id=local_rank)\n")
    assert text == "# here\ntorch.cuda.set_device(local_rank)\nfully_shard(model)\n"
    text = rewritten("torch.cuda.set_device(local_rank)\nmodel = FSDP(model, device_id=local_rank)\n")
    assert text.count("set_device") == 1


def test_sync_module_states_broadcasts_before_sharding(rewritten: Callable) -> None:
    text = rewritten("model = FSDP(model, device_id=torch.cuda.current_device(), sync_module_states=True)\n")
    lines = [line.strip() for line in text.splitlines()]
    assert lines[1] == "model.to(torch.cuda.current_device())"
    assert lines[3] == "dist.broadcast(tensor.detach(), src=0)" and lines[4] == "fully_shard(model)"
    assert "broadcast" not in rewritten("model = FSDP(model, sync_module_states=False)\n")


def test_rank_0_holds_the_weights_and_the_others_meta(rewritten: Callable) -> None:
    text = rewritten(
        "def empty(m): return m.to_empty(device='cuda', recurse=False)\n"
        "model = FSDP(model, param_init_fn=empty if dist.get_rank() else None, sync_module_states=True)\n"
    )
    assert text.index("full_state = model.state_dict()") < text.index("fully_shard(model)")
    assert text.index("fully_shard(model)") < text.index("model.to_empty(") < text.index("set_model_state_dict(")
    assert "broadcast_from_rank0=True" in text


def test_gathering_is_hoisted_out_of_a_rank_guard(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\nif dist.get_rank() == 0:\n    print(1)\n    torch.save(model.state_dict(), 'm.pt')\n"
    )
    assert text.index("get_model_state_dict(") < text.index("if dist.get_rank() == 0:")
    assert "torch.save(model_state, 'm.pt')" in text


def test_a_state_dict_before_the_wrap_stays(rewritten: Callable) -> None:
    text = rewritten("torch.save(model.state_dict(), 'a.pt')\nmodel = FSDP(model)\nb = model.state_dict()\n")
    assert "torch.save(model.state_dict(), 'a.pt')" in text and "b = get_model_state_dict(" in text


def test_local_state_dicts_are_left(migrated: Callable) -> None:
    found = migrated(
        HEAD + "# here\nmodel = FSDP(model)\nwith FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):\n"
        "    torch.save(model.state_dict(), f'{rank}.pt')\n"
    )
    assert "with FSDP.state_dict_type(" in found.text and found.grades.count("manual") == 2


def test_the_old_order_of_optim_state_dict_to_load(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "osd = FSDP.optim_state_dict_to_load(saved, model, optimizer)\noptimizer.load_state_dict(osd)\n"
    )
    assert "osd = saved\nset_optimizer_state_dict(model, optimizer, own_steps(osd), options=StateDictOptions(" in text


def test_state_that_only_rank_0_loads_is_broadcast(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\nif rank == 0:\n    state = torch.load('m.pt')\nelse:\n    state = None\n"
        "model.load_state_dict(state)\n"
    )
    assert "set_model_state_dict(model, state or {}" in text and "broadcast_from_rank0=True" in text


def test_the_sharded_optimizer_state_is_loaded_by_dcp(rewritten: Callable) -> None:
    text = rewritten(
        "from torch.distributed.checkpoint import FileSystemReader\n"
        "from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict\n"
        "model = FSDP(model)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n"
        "    osd = load_sharded_optimizer_state_dict(model.state_dict(), 'optim', FileSystemReader(path))\n"
        "    flat = FSDP.optim_state_dict_to_load(model, optimizer, osd['optim'])\n"
        "    optimizer.load_state_dict(flat)\n"
    )
    assert "osd = {'optim': get_optimizer_state_dict(model, optimizer)}" in text
    assert "dcp.load(osd, storage_reader=FileSystemReader(path))" in text
    assert "set_optimizer_state_dict(model, optimizer, flat)" in text


def test_generate_needs_no_context(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\nwith FSDP.summon_full_params(model, writeback=False):\n"
        "    # a sample\n    out = model.generate(ids)\nprint(out)\n"
    )
    assert text.endswith("fully_shard(model)\n# a sample\nout = model.generate(ids)\nprint(out)\n")


def test_a_context_around_a_text_of_several_lines_stays(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(model)\nwith FSDP.summon_full_params(model):\n"
        "    prompt = '''one\n    two'''\n    out = model.generate(prompt)\n"
    )
    assert "with nullcontext():\n    prompt = '''one\n    two'''\n" in text


def test_clipping_of_the_local_shards_is_announced(migrated: Callable) -> None:
    found = migrated(
        HEAD + "# here\nmodel = FSDP(model)\nnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)\n"
    )
    assert "numerics" in found.grades
    assert "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()\n" in found.text
    assert found.text.endswith("torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)\n")


def test_an_optimizer_of_another_model_stays_where_it_is(rewritten: Callable) -> None:
    text = rewritten(
        "a = torch.optim.SGD(teacher.parameters(), 0.1)\nb = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model = FSDP(model)\n"
    )
    assert text.index("a = ") < text.index("fully_shard(model)") < text.index("b = ")


def test_wraps_in_a_comprehension(rewritten: Callable, migrated: Callable) -> None:
    assert "[fully_shard(l) for l in layers]" in rewritten("layers = [FSDP(l) for l in layers]\n")
    code = "layers = [FSDP(l, auto_wrap_policy=ModuleWrapPolicy({Block})) for l in layers]\n"
    found = migrated(HEAD + "# here\n" + code)
    assert code in found.text and found.grades == ["manual"]


def test_arguments_known_only_at_run_time_are_left_with_all_uses_of_the_model(migrated: Callable) -> None:
    code = "model = FSDP(model, **options)\nwith model.no_sync():\n    model.module.step(model.state_dict())\n"
    found = migrated(HEAD + "# here\n" + code)
    assert found.text.endswith(code) and found.grades == ["manual"]


def test_a_conditional_wrap_keeps_its_condition(rewritten: Callable) -> None:
    text = rewritten("model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block})) if sharded else Two(model)\n")
    assert text.startswith("# here\nif sharded:\n    for module in") and text.endswith(
        "else:\n    model = Two(model)\n"
    )


def test_comments_in_the_call_are_kept(rewritten: Callable) -> None:
    text = rewritten(
        "model = FSDP(\n    model,  # the student\n    auto_wrap_policy=ModuleWrapPolicy({Block}),\n    # less memory\n"
        "    use_orig_params=True,\n)  # end\n"
    )
    assert "# the student" in text and "# less memory" in text and "fully_shard(model)  # end" in text


def test_a_norm_of_a_model_that_only_a_subclass_shards_is_gathered_where_it_is_sharded(migrated: Callable) -> None:
    found = migrated(
        HEAD + "# here\nclass Plain:\n    def __init__(self, model):\n        self.model = model\n"
        "    def clip(self):\n        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()\n"
        "class Sharded(Plain):\n    def __init__(self, model):\n        self.model = FSDP(model)\n"
        "    def clip(self):\n        return self.model.clip_grad_norm_(1.0).item()\n"
    )
    assert "return whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)).item()" in found.text
    assert "clip_grad_norm_(self.model.parameters(), 1.0).full_tensor().item()" in found.text
    assert "manual" not in found.grades
