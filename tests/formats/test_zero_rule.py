"""The rules by which ZeRO cuts parameters, held against DeepSpeed's own functions and against plain concatenation."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor
from ckptkit.formats._zero_flat import joined
from ckptkit.formats._zero_rule import FlatRule, PartitionRule, alignment_paddings, part, round_robin, sub_groups
from ckptkit.opened import read_tensor

# A busy machine is no reason to fail, and examples are cheap only once DeepSpeed is imported.
unhurried = settings(deadline=None, max_examples=60)
shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=7)
ranks = st.integers(1, 7)


def numbered(all_shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors in which no element equals another, nor a padding's zero."""
    out, at = [], 1
    for shape in all_shapes:
        size = math.prod(shape)
        out.append(torch.arange(at, at + size, dtype=torch.float32).reshape(shape))
        at += size
    return out


def held(vector: torch.Tensor) -> Tensor:
    return Tensor.at(Constant(vector.contiguous().numpy().tobytes()), tuple(vector.shape), "float32")


def check(rule: FlatRule | PartitionRule, tensors: list[torch.Tensor], vectors: list[torch.Tensor]) -> None:
    names = {f"p{index}": tuple(t.shape) for index, t in enumerate(tensors)}
    found = joined(names, rule, [held(vector) for vector in vectors], "float32")
    for name, expected in zip(names, tensors, strict=True):
        assert torch.equal(read_tensor(found[name]), expected)


@unhurried
@given(shapes, ranks, st.booleans())
def test_flat_groups_come_back(all_shapes: list[tuple[int, ...]], world: int, aligned: bool) -> None:
    tensors = numbered(all_shapes)
    numels = [t.numel() for t in tensors]
    paddings = alignment_paddings(numels, "bfloat16") if aligned else [0] * len(numels)
    rule = FlatRule.of(numels, world, paddings)
    flat = torch.cat([torch.cat([t.flatten(), torch.zeros(p)]) for t, p in zip(tensors, paddings, strict=True)])
    # DeepSpeed: flatten_dense_tensors_aligned to 2 * world, then get_data_parallel_partitions.
    whole = torch.cat([flat, torch.zeros(-flat.numel() % (2 * world))])
    vectors = list(whole.chunk(world)) if whole.numel() else [whole] * world
    assert [rule.size] * world == [v.numel() for v in vectors]
    check(rule, tensors, vectors)
    lean = [v[: rule.lean(rank)] for rank, v in enumerate(vectors)]
    assert torch.equal(torch.cat(lean), flat), "padding stripped from the end alone"
    check(rule, tensors, lean)


@unhurried
@given(shapes, ranks)
def test_partitions_come_back(all_shapes: list[tuple[int, ...]], world: int) -> None:
    tensors = numbered(all_shapes)
    parts = [torch.cat([t.flatten(), torch.zeros(-t.numel() % world)]).chunk(world) for t in tensors]
    vectors = [torch.cat([own[rank] for own in parts]) for rank in range(world)]
    rule = PartitionRule.of([t.numel() for t in tensors], world)
    assert [rule.size] * world == [v.numel() for v in vectors]
    check(rule, tensors, vectors)


@unhurried
@given(shapes, ranks, st.integers(0, 30), st.data())
def test_one_element_off_is_seen(all_shapes: list[tuple[int, ...]], world: int, at: int, data: st.DataObject) -> None:
    """The control: a vector that is moved by one element gives other tensors."""
    tensors = numbered(all_shapes)
    rule = PartitionRule.of([t.numel() for t in tensors], world)
    parts = [torch.cat([t.flatten(), torch.zeros(-t.numel() % world)]).chunk(world) for t in tensors]
    vectors = [torch.cat([own[rank] for own in parts]) for rank in range(world)]
    vectors[at % world] = torch.cat([torch.zeros(1), vectors[at % world][:-1]])
    if sum(t.numel() for t in tensors) > 0 and any(True for _ in rule.spans(at % world)):
        with pytest.raises(AssertionError):
            check(rule, tensors, vectors)


@unhurried
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), ranks)
def test_every_element_lies_once(numels: list[int], world: int) -> None:
    for rule in (FlatRule.of(numels, world), PartitionRule.of(numels, world)):
        seen = [
            (span.index, element)
            for rank in range(world)
            for span in rule.spans(rank)
            for element in range(span.start, span.stop)
        ]
        assert sorted(seen) == [(index, element) for index, numel in enumerate(numels) for element in range(numel)]
        for rank in range(world):
            ends = [(span.offset, span.offset + span.stop - span.start) for span in rule.spans(rank)]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends)), "spans of a vector do not overlap"
            assert not ends or ends[-1][1] <= rule.size


@unhurried
@given(st.integers(1, 12), ranks)
def test_round_robin_is_deepspeeds(count: int, world: int) -> None:
    stage = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    names = [f"p{index}" for index in range(count)]
    theirs, _ = stage.DeepSpeedZeroOptimizer._round_robin_reorder(None, names, world)
    assert [names[index] for index in round_robin(count, world)] == theirs


@unhurried
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), ranks, st.integers(0, 80))
def test_sub_groups_are_deepspeeds(numels: list[int], world: int, limit: int) -> None:
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    params = [
        SimpleNamespace(number=n, partition_numel=lambda size=size: part(size, world)) for n, size in enumerate(numels)
    ]
    owner = SimpleNamespace(sub_group_size=limit)
    theirs = stage3.DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups(owner, params)
    assert sub_groups(numels, world, limit) == [[param.number for param in group] for group in theirs]


@unhurried
@given(st.integers(1, 200), ranks)
def test_parts_are_deepspeeds(numel: int, world: int) -> None:
    zero_to_fp32 = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    assert part(numel, world) == zero_to_fp32.zero3_partitioned_param_info(numel, world)[0]
