"""Every strategy trains as one process does: losses, norms, weights, moments, groups; and faults are seen."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import pytest
import torch

from ckptkit.errors import UsageError
from ckptkit.verify.pool import Pool
from ckptkit.verify.runner import run_one, run_strategies
from ckptkit.verify.strategies import Options, all_strategies, get_strategy
from ckptkit.verify.strategies._names import names_of
from ckptkit.verify.trace import Trace
from ckptkit.verify.workload import Workload, fingerprint, local_batch, rows_in, units, warmup

EXPECTED = {
    *("single", "ddp", "fsdp1", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp1-hybrid"),
    *("fsdp2", "fsdp2-no-reshard", "fsdp2-hybrid"),
    *("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"),
}
OTHERS = sorted(EXPECTED - {"single"})
SETTINGS = {
    "adamw": Options(),
    "sgd": Options(optimizer="sgd", clip=0.3, accumulate=2),
    "bf16": Options(precision="bf16"),
}
STEPS = 5
Runner = Callable[[str, str, int], Trace]


@pytest.fixture(scope="module")
def trained(pool: Pool) -> Runner:
    @cache
    def run(name: str, setting: str, world_size: int) -> Trace:
        package = get_strategy(name).package
        if package is not None and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        trace = run_one(pool, name, Workload(), SETTINGS[setting], world_size, STEPS)
        assert trace.status == "ran", trace.reason
        return trace

    return run


def worst(reference: list[float], other: list[float]) -> float:
    assert len(reference) == len(other) == STEPS
    return max(abs(a - b) / abs(a) for a, b in zip(reference, other, strict=True))


def test_the_folder_holds_every_strategy() -> None:
    assert set(all_strategies()) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_equals_one_process_in_fp32(trained: Runner, name: str) -> None:
    reference, trace = trained("single", "adamw", 1), trained(name, "adamw", 2)
    assert worst(list(reference.losses), list(trace.losses)) < 1e-6
    assert [r.data for r in trace.steps] == [r.data for r in reference.steps]
    assert [r.lrs for r in trace.steps] == [r.lrs for r in reference.steps]
    norms = [[r.grad_norm or 0.0 for r in t.steps] for t in (reference, trace)]
    assert worst(*norms) < 1e-6
    assert trace.groups == reference.groups
    for moment in ("initial", "after_first", "final", "optimizer_first", "optimizer"):
        ours, theirs = getattr(reference, moment), getattr(trace, moment)
        assert set(ours) == set(theirs), moment
        for key, summary in ours.items():
            assert theirs[key].shape == summary.shape
            torch.testing.assert_close(theirs[key].sample, summary.sample, rtol=1e-4, atol=1e-6)
    assert {k: s.checksum for k, s in trace.initial.items()} == {k: s.checksum for k, s in reference.initial.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3"])
def test_equals_one_process_with_sgd_clipping_and_accumulation_on_three_ranks(trained: Runner, name: str) -> None:
    reference, trace = trained("single", "sgd", 1), trained(name, "sgd", 3)
    assert worst(list(reference.losses), list(trace.losses)) < 1e-6
    assert min(r.grad_norm or 0.0 for r in reference.steps) > 0.3, "the clipping has to bite"


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_bf16_stays_within_its_bound(trained: Runner, name: str) -> None:
    reference, trace = trained("single", "bf16", 1), trained(name, "bf16", 2)
    assert worst(list(reference.losses), list(trace.losses)) < 5e-4
    assert trace.initial.keys() == reference.initial.keys()
    fp32 = trained("single", "adamw", 1)
    assert worst(list(fp32.losses), list(trace.losses)) > 1e-7, "it has to compute in bf16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "setting"),
    [("no_broadcast", "adamw"), ("deepspeed_clips", "adamw"), ("one_weight_decay", "sgd")],
)
def test_a_planted_fault_is_seen(trained: Runner, broken: str, setting: str) -> None:
    """AdamW hides a wrong gradient scale from the loss at first; its second moment and the norms do not."""
    reference = trained("single", setting, 1)
    trace = trained(f"tests.verify.broken_strategies:{broken}", setting, 2)
    loss = worst(list(reference.losses), list(trace.losses))
    assert loss > 1e-6 or _moments_differ(reference, trace)


def _moments_differ(reference: Trace, trace: Trace) -> bool:
    keys = [k for k in reference.optimizer_first if k.endswith(":exp_avg_sq")]
    return any(abs(trace.optimizer_first[k].norm / reference.optimizer_first[k].norm - 1) > 1e-3 for k in keys)


@pytest.mark.slow
def test_run_strategies_puts_the_reference_first_and_goes_on_after_a_failure(pool: Pool) -> None:
    names = ["tests.verify.broken_strategies:raising", "ddp"]
    traces = run_strategies(Workload(), names, world_size=2, steps=2, pool=pool)
    assert [(t.strategy, t.status, t.world_size) for t in traces] == [
        ("single", "ran", 1),
        (names[0], "failed", 2),
        ("ddp", "ran", 2),
    ]
    assert "RuntimeError: planted" in traces[1].reason


def test_a_missing_package_is_not_run(pool: Pool) -> None:
    trace = run_one(pool, "tests.verify.broken_strategies:without_package", Workload(), Options(), 1, 1)
    assert trace.status == "not run"
    assert "nonesuch" in trace.reason


def test_an_unknown_strategy_and_a_batch_that_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="fsdp3"):
        get_strategy("fsdp3")
    with pytest.raises(UsageError, match="5 equal parts"):
        local_batch(Workload(), 0, part=0, parts=5, device="cpu")


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 12])
def test_the_parts_of_a_batch_are_the_batch(parts: int) -> None:
    pieces = [local_batch(Workload(), 3, part=i, parts=parts, device="cpu") for i in range(parts)]
    whole = local_batch(Workload(), 3, part=0, parts=1, device="cpu")
    assert torch.equal(torch.cat([tokens for tokens, _ in pieces]), whole[0])
    assert (sum(fingerprint(piece) for piece in pieces) - fingerprint(whole)) % 2**64 == 0
    assert fingerprint(whole) != fingerprint(local_batch(Workload(), 4, part=0, parts=1, device="cpu"))


def test_the_default_model_has_what_migrations_lose() -> None:
    from ckptkit.verify.workload import build_model

    model, names = build_model(Workload(), 0), names_of(Workload())
    assert names.aliases == {"head.weight": "embedding.weight"}
    assert names.frozen == ("frozen.weight", "frozen.bias")
    assert set(names.buffers) == {"gain", "temperature", "calls", "keep"}
    assert {type(u).__name__ for u in units(model)} == {"Block", "Linear"}
    assert rows_in(Workload()) == 12
    assert len({warmup(step) for step in range(12)}) == 12
    other = build_model(Workload(), 1).state_dict()
    same = {k for k, v in build_model(Workload(), 0).state_dict().items() if torch.equal(v, other[k])}
    assert same <= {"calls", *(k for k in other if ".norm" in k or k.startswith("norm."))}


@pytest.mark.slow
def test_a_model_and_batches_of_the_users_own(pool: Pool) -> None:
    pytest.importorskip("transformers")
    module = "tests.verify.user_workload"
    workload = Workload(model=f"{module}:model", batch=f"{module}:batch")
    names = ["ddp", "fsdp1", "fsdp2", *(["zero3"] if importlib.util.find_spec("deepspeed") else [])]
    reference, *traces = run_strategies(workload, names, world_size=2, steps=STEPS, pool=pool)
    assert [trace.reason for trace in traces] == [""] * len(names)
    for trace in traces:
        assert worst(list(reference.losses), list(trace.losses)) < 1e-6, trace.label
