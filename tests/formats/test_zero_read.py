"""zero: what real DeepSpeed directories hold, what old ones lack, and what is refused instead of guessed."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.spec import TensorKey
from ckptkit.errors import SourceError, UnsafePickleError
from tests.truth import differences, truth_of

from .zero_edit import copy_of, edit, edit_models, edit_optims, tag_of

pytestmark = pytest.mark.slow
Fixtures = Callable[[str], Path]
MODEL = "ckptkit.verify.default_model:default_model"


@pytest.fixture
def copied(fixture_dir: Fixtures, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a fixture's checkpoint, free to be changed."""

    def copy(name: str) -> Path:
        truth = truth_of(fixture_dir(name))
        return copy_of(truth.path, tmp_path / name)

    return copy


def same_as(checkpoint: Path, fixture: Path) -> list[str]:
    return differences(ckptkit.open(checkpoint), truth_of(fixture))


@pytest.mark.parametrize("name", ["zero2-ws3", "zero3-bf16", "zero1-bf16-optimizer", "zero2-round-robin"])
def test_a_run_and_its_tag_read_the_same(name: str, fixture_dir: Fixtures) -> None:
    folder = fixture_dir(name)
    path = truth_of(folder).path
    assert same_as(path, folder) == []
    assert same_as(tag_of(path), folder) == []


def test_round_robin_groups_are_in_the_optimizers_order(fixture_dir: Fixtures) -> None:
    """Other targets number parameters by this order, so the shuffle of the files must not get out."""
    truth = truth_of(fixture_dir("zero1-round-robin"))
    read = [group["params"] for group in ckptkit.open(truth.path).param_groups]
    assert read == [group["params"] for group in truth.info["param_groups"]]


def test_round_robin_is_seen_without_the_configuration(copied: Callable[[str], Path], fixture_dir: Fixtures) -> None:
    path = copied("zero1-round-robin")
    edit_models(path, lambda tree: tree.pop("ds_config") and None)
    truth = truth_of(fixture_dir("zero1-round-robin"))
    checkpoint = ckptkit.open(path)
    assert differences(checkpoint, truth) == []
    assert [group["params"] for group in checkpoint.param_groups] == [g["params"] for g in truth.info["param_groups"]]


def test_bf16_weights_at_stage_3_are_their_masters_rounded(fixture_dir: Fixtures) -> None:
    truth = truth_of(fixture_dir("zero3-bf16"))
    checkpoint = ckptkit.open(truth.path)
    key = TensorKey("blocks.0.query.weight")
    assert checkpoint.entries[key].spec.dtype == "bfloat16"
    assert {piece.dtype for piece in checkpoint.entries[key].pieces} == {"float32"}
    assert torch.equal(checkpoint.read(*key), truth.tensors[key.fqn, "value"])


def test_an_fp32_run_has_no_masters(fixture_dir: Fixtures) -> None:
    checkpoint = ckptkit.open(truth_of(fixture_dir("zero2")).path)
    assert not [key for key in checkpoint.entries if key.slot == "master"]


def test_extras_and_facts(fixture_dir: Fixtures) -> None:
    truth = truth_of(fixture_dir("zero3"))
    checkpoint = ckptkit.open(truth.path)
    assert checkpoint.extras["note"] == {"epoch": 1, "tokens_seen": 396, "best_loss": 2.5, "tags": ["a", "b"]}
    assert checkpoint.extras["scheduler"]["last_epoch"] == truth.info["step"] == checkpoint.step == 3
    assert (checkpoint.extras["skipped_steps"], checkpoint.extras["global_samples"]) == (0, 36)
    assert checkpoint.extra("rng")["torch"].dtype == torch.uint8
    assert checkpoint.aliases == truth.info["aliases"] == {"head.weight": "embedding.weight"}
    assert not {"ds_config", "dp_world_size", "buffer_names"} & set(checkpoint.extras)
    assert checkpoint.world_size == 2
    assert checkpoint.read("calls")[0] == 2**40 + 3 + 3, "an int64 buffer that no float holds"


def test_client_state_that_has_the_name_of_an_extra_is_kept_apart(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")
    edit_models(path, lambda tree: tree.update(step=7, scheduler="mine", skipped=1))
    extras = ckptkit.open(path).extras
    assert extras["client_state"] == {"step": 7, "scheduler": "mine"}
    assert (extras["step"], extras["skipped"]) == (3, 1)


# What older versions wrote (layouts of 0.8 to 0.16; the fixtures are of today's).


def test_sets_and_removed_keys_of_old_versions(copied: Callable[[str], Path], fixture_dir: Fixtures) -> None:
    path = copied("zero2")

    def old_model(tree: dict[str, Any]) -> None:
        tree["sparse_tensor_module_names"] = set()
        tree.pop("checkpoint_parallel_dimensions", None)

    edit_models(path, old_model)
    edit_optims(path, lambda tree: tree.pop("param_alignment_paddings") and None)
    assert same_as(path, fixture_dir("zero2")) == []
    assert "sparse_tensor_module_names" not in ckptkit.open(path).extras


def test_ties_without_shared_params_are_seen_by_their_storage(
    copied: Callable[[str], Path], fixture_dir: Fixtures
) -> None:
    """DeepSpeed 0.8 pickled the module as it was: both names of a tie are one storage."""
    path = copied("zero2")

    def old(tree: dict[str, Any]) -> None:
        for key in ("shared_params", "frozen_param_shapes", "frozen_param_fragments"):
            del tree[key]
        tree["module"]["head.weight"] = tree["module"]["embedding.weight"]

    edit_models(path, old)
    assert same_as(path, fixture_dir("zero2")) == []
    assert ckptkit.open(path).aliases == {"head.weight": "embedding.weight"}


def test_what_zero3_of_old_versions_does_not_hold_is_named(
    copied: Callable[[str], Path], fixture_dir: Fixtures
) -> None:
    path = copied("zero3")

    def old(tree: dict[str, Any]) -> None:
        for key in ("shared_params", "frozen_param_shapes", "frozen_param_fragments"):
            del tree[key]

    edit_models(path, old)
    checkpoint = ckptkit.open(path)
    assert {drop.what for drop in checkpoint.drops} == {"head.weight", "frozen.weight", "frozen.bias"}
    assert all("no data" in drop.reason for drop in checkpoint.drops)
    missing = differences(checkpoint, truth_of(fixture_dir("zero3")))
    assert len(missing) == 2 and all(text.startswith("missing: 'frozen.") for text in missing)
    assert {drop.what for drop in ckptkit.open(path, model=MODEL).drops} == {"frozen.weight", "frozen.bias"}


def test_the_step_of_old_versions_is_one_more_and_said(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")

    def ahead(tree: dict[str, Any]) -> None:
        for state in tree["base_optimizer_state"]["state"].values():
            state["step"] += 1

    edit_optims(path, ahead)
    checkpoint = ckptkit.open(path)
    assert checkpoint.read("norm.weight", "step") == 4 and checkpoint.step == 3
    assert any("at step 3, the optimizer at 4" in text for text in checkpoint.warnings)


def test_shapes_may_be_plain_tuples(copied: Callable[[str], Path], fixture_dir: Fixtures) -> None:
    path = copied("zero3")

    def plain(tree: dict[str, Any]) -> None:
        tree["param_shapes"] = [OrderedDict((n, tuple(s)) for n, s in group.items()) for group in tree["param_shapes"]]

    edit_models(path, plain)
    assert same_as(path, fixture_dir("zero3")) == []


def test_a_fused_optimizer_that_counts_in_its_group(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")

    def fused(tree: dict[str, Any]) -> None:
        base = tree["base_optimizer_state"]
        for state in base["state"].values():
            del state["step"]
        for group in base["param_groups"]:
            group["step"] = 3

    edit_optims(path, fused)
    assert ckptkit.open(path).read("norm.weight", "step") == 3


def test_state_that_is_not_cut_belongs_to_every_parameter(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")

    def more(tree: dict[str, Any]) -> None:
        for state in tree["base_optimizer_state"]["state"].values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"] * 2
            state["mu_product"] = torch.tensor(0.5)
            state["name"] = "adam"

    edit_optims(path, more)
    checkpoint = ckptkit.open(path)
    name = "blocks.0.up.weight"
    assert torch.equal(checkpoint.read(name, "max_exp_avg_sq"), checkpoint.read(name, "exp_avg_sq") * 2)
    assert checkpoint.read(name, "mu_product") == 0.5
    assert checkpoint.optimizer_values[name] == {"name": "adam"}


def test_elastic_files_have_no_hyper_parameters_and_it_is_said(fixture_dir: Fixtures) -> None:
    truth = truth_of(fixture_dir("zero2-elastic"))
    checkpoint = ckptkit.open(truth.path)
    assert [text for text in differences(checkpoint, truth) if " of " not in text] == []
    assert any("hold no hyper-parameters: lr is from the scheduler" in text for text in checkpoint.warnings)
    for mine, theirs in zip(checkpoint.param_groups, truth.info["param_groups"], strict=True):
        assert (mine["lr"], mine["initial_lr"]) == (theirs["lr"], theirs["initial_lr"]) and "weight_decay" not in mine


@pytest.mark.parametrize("kind", ["DynamicLossScaler", "LossScaler"])
@pytest.mark.parametrize("name", ["zero2-bf16", "zero3-bf16"])
def test_fp16_with_its_loss_scaler(name: str, kind: str, copied: Callable[[str], Path]) -> None:
    """DeepSpeed refuses fp16 on CPU: bf16 files with fp16 weights and DeepSpeed's own scaler object."""
    path = as_fp16(copied(name), kind)
    checkpoint = ckptkit.open(path)
    assert checkpoint.tensors[TensorKey("norm.weight")].dtype == "float16"
    assert torch.equal(checkpoint.read("norm.weight"), checkpoint.read("norm.weight", "master").half())
    scaler = checkpoint.extras["scaler"]
    assert scaler["scale"] == 4096.0 and scaler["deepspeed"]["kind"] == kind
    if kind == "DynamicLossScaler":
        assert (scaler["growth_factor"], scaler["growth_interval"], scaler["_growth_tracker"]) == (2.0, 100, 2)
        assert scaler["deepspeed"]["dtype"] == "float16"
        # torch takes it as it is.
        grad_scaler = torch.amp.GradScaler("cpu")
        grad_scaler.load_state_dict(scaler)
        assert grad_scaler.get_scale() == 4096.0 and grad_scaler._init_growth_tracker == 2


def as_fp16(path: Path, kind: str) -> Path:
    """The files that the run would have left had it been in fp16."""
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    masters = {key.fqn: ckptkit.open(path).read(*key) for key in ckptkit.open(path).entries if key.slot == "master"}
    if kind == "LossScaler":
        scaler: Any = scalers.LossScaler(4096.0)
    else:
        scaler = scalers.DynamicLossScaler(4096.0, 100, 1, 2, False)
        scaler.cur_iter, scaler.last_overflow_iter = 9, 6

    def model(tree: dict[str, Any]) -> None:
        for name, held in tree["module"].items():
            if held.dtype == torch.bfloat16:
                tree["module"][name] = masters[name].half() if name in masters and held.numel() else held.half()

    edit_models(path, model)
    edit_optims(path, lambda tree: tree.update(loss_scaler=scaler, dynamic_loss_scale=scaler.dynamic))
    for file in tag_of(path).glob("bf16_*"):
        file.rename(file.with_name(file.name.removeprefix("bf16_")))
    return path


# What is refused.


def test_every_missing_rank_is_named_in_one_error(copied: Callable[[str], Path]) -> None:
    path = copied("zero1-ws4")
    for rank in (1, 3):
        (tag_of(path) / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(SourceError) as caught:
        ckptkit.open(path)
    assert [fault[:7] for fault in caught.value.faults] == ["rank 1:", "rank 3:"]


def test_missing_model_files_of_zero3_are_named(copied: Callable[[str], Path]) -> None:
    path = copied("zero3-ws4")
    for rank in (2, 3):
        (tag_of(path) / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(SourceError) as caught:
        ckptkit.open(path)
    assert len(caught.value.faults) == 2 and "model_states" in caught.value.faults[0]


def test_a_rank_of_another_step_is_refused_with_the_evidence(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")

    def later(tree: dict[str, Any]) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1

    edit(tag_of(path) / "zero_pp_rank_1_mp_rank_00_optim_states.pt", later)
    with pytest.raises(SourceError, match="not of one step") as caught:
        ckptkit.open(path)
    assert any(
        "is 3.0 in zero_pp_rank_0" in fault and "4.0 in zero_pp_rank_1" in fault for fault in caught.value.faults
    )


def test_a_rank_of_another_step_is_seen_without_a_counter(copied: Callable[[str], Path]) -> None:
    """SGD counts nothing; the learning rate of the moment tells."""
    path = copied("zero1-sgd")

    def later(tree: dict[str, Any]) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] *= 0.9

    edit(tag_of(path) / "zero_pp_rank_1_mp_rank_00_optim_states.pt", later)
    with pytest.raises(SourceError, match="not of one step"):
        ckptkit.open(path)


def test_a_model_file_of_another_step_is_refused_at_zero3(copied: Callable[[str], Path]) -> None:
    path = copied("zero3")
    edit(tag_of(path) / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda tree: tree.update(global_steps=4))
    with pytest.raises(SourceError, match="not of one save") as caught:
        ckptkit.open(path)
    assert any("global_steps" in fault for fault in caught.value.faults)


def test_files_of_another_world_size_are_refused(fixture_dir: Fixtures, copied: Callable[[str], Path]) -> None:
    path = copied("zero2")
    other = tag_of(truth_of(fixture_dir("zero2-ws3")).path)
    shutil.copy(other / "zero_pp_rank_2_mp_rank_00_optim_states.pt", tag_of(path))
    with pytest.raises(SourceError, match="different numbers of ranks"):
        ckptkit.open(path)
    (tag_of(path) / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    shutil.copy(other / "mp_rank_00_model_states.pt", tag_of(path))
    with pytest.raises(SourceError, match="run on 3 ranks"):
        ckptkit.open(path)


def test_a_partition_that_does_not_fit_the_shapes_is_refused(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")

    def shorter(tree: dict[str, Any]) -> None:
        held = tree["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        held[0] = held[0][:-5].clone()

    edit(tag_of(path) / "zero_pp_rank_0_mp_rank_00_optim_states.pt", shorter)
    with pytest.raises(SourceError, match="do not fit the shapes"):
        ckptkit.open(path)


def test_a_truncated_file_is_a_source_error(copied: Callable[[str], Path]) -> None:
    path = copied("zero3")
    file = tag_of(path) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(SourceError, match="zero_pp_rank_1"):
        ckptkit.open(path)


@pytest.mark.parametrize("pointer", ["../zero2/global_step3", "/etc", "a/../../b", "..\\zero2", ""])
def test_a_pointer_out_of_the_folder_is_refused(pointer: str, copied: Callable[[str], Path]) -> None:
    path = copied("zero2")
    (path / "latest").write_text(pointer)
    with pytest.raises(SourceError, match="points to"):
        ckptkit.open(path)


def test_a_pointer_to_nothing_says_so(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")
    (path / "latest").write_text("global_step9")
    with pytest.raises(SourceError, match="not there"):
        ckptkit.open(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layer_00_expert_0_mp_rank_00_model_states.pt", "MoE"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expert-parallel"),
        ("layer_01-model_00-model_states.pt", "pipeline"),
        ("mp_rank_01_model_states.pt", "tensor-parallel rank 01"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor-parallel rank 01"),
        ("offloaded_tensors", "NVMe"),
    ],
)
def test_more_than_data_parallel_is_refused_by_name(name: str, said: str, copied: Callable[[str], Path]) -> None:
    path = copied("zero2")
    (tag_of(path) / name).touch()
    with pytest.raises(SourceError, match="more than data parallel") as caught:
        ckptkit.open(path)
    assert any(said in fault and name in fault for fault in caught.value.faults)


def test_two_checkpoints_in_one_folder_are_refused(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")
    shutil.copy(
        tag_of(path) / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        tag_of(path) / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(SourceError, match="two checkpoints"):
        ckptkit.open(path)


class Evil:
    """What a crafted pickle would do, had it been loaded by pickle itself."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("where", ["model", "optimizer", "nested"])
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_crafted_pickle_runs_nothing(name: str, where: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    path, mark = copied(name), tmp_path / "ran"
    if where == "model":
        edit_models(path, lambda tree: tree.update(client=Evil(mark)))
    elif where == "optimizer":
        edit_optims(path, lambda tree: tree.update(loss_scaler=Evil(mark)))
    else:
        edit_models(path, lambda tree: tree["module"].update(extra={"a": [Evil(mark)]}))
    with pytest.raises(UnsafePickleError, match="system"):
        ckptkit.open(path)
    assert not mark.exists()


def test_zero0_ids_are_told_apart_by_the_model(fixture_dir: Fixtures) -> None:
    for name in ("zero0", "zero0-bf16"):
        truth = truth_of(fixture_dir(name))
        assert differences(ckptkit.open(truth.path, model=truth.model), truth) == []


def test_weights_without_optimizer_files_are_readable_and_the_loss_is_named(copied: Callable[[str], Path]) -> None:
    path = copied("zero2")
    for file in tag_of(path).glob("*_optim_states.pt"):
        file.unlink()
    checkpoint = ckptkit.open(path)
    assert [drop.what for drop in checkpoint.drops] == ["optimizer"]
    assert checkpoint.read("norm.weight").shape == (35,)


def test_zero3_without_optimizer_files_has_no_weights(copied: Callable[[str], Path]) -> None:
    path = copied("zero3")
    for file in tag_of(path).glob("*_optim_states.pt"):
        file.unlink()
    with pytest.raises(SourceError, match="no optimizer files"):
        ckptkit.open(path)


def test_a_fused_adam_without_zero_counts_in_one_state(copied: Callable[[str], Path], fixture_dir: Fixtures) -> None:
    """FusedAdam at ZeRO-0 leaves the steps of all but a group's last parameter where they began."""
    path = copied("zero0")

    def fused(tree: dict[str, Any]) -> None:
        for group in tree["optimizer"]["param_groups"]:
            group["bias_correction"] = True
            for key in group["params"]:
                tree["optimizer"]["state"][key]["step"] = 3 if key == group["params"][-1] else 0

    edit_models(path, fused)
    checkpoint = ckptkit.open(path, model=MODEL)
    assert {float(checkpoint.read(key.fqn, "step")) for key in checkpoint.entries if key.slot == "step"} == {3.0}
