"""A trace survives JSON whole, non-finite numbers included; a summary tells bit-equality."""

import json
import math

import pytest
import torch

from ckptkit.verify.summary import sample_places, summarize, summarize_all
from ckptkit.verify.trace import StepRecord, Trace, read_trace, trace_from_json, trace_to_json, write_trace


def test_round_trip(tmp_path):
    summaries = summarize_all({"w": torch.randn(3, 5), "step": torch.tensor(3.0), "empty": torch.empty(0, 4)})
    trace = Trace(
        "fsdp2", "fsdp2", 2, "fp32",
        steps=(StepRecord(0, 1.5, 0.25, (0.1, 0.01), 0.2, "ab"), StepRecord(1, math.inf)),
        initial=summaries, after_first=summaries, final=summaries, optimizer=summaries,
        groups={"w": {"lr": 0.1, "betas": (0.9, 0.95), "fused": None}}, environment={"torch": "2"},
    )  # fmt: skip
    write_trace(trace, tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == trace
    nan = Trace("a", "b", 1, "fp32", steps=(StepRecord(0, math.nan),))
    assert math.isnan(trace_from_json(json.loads(json.dumps(trace_to_json(nan)))).losses[0])


def test_an_unknown_schema_is_refused():
    with pytest.raises(ValueError, match="schema"):
        trace_from_json({"schema": 99})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_one_changed_element_changes_the_checksum(dtype):
    tensor = torch.ones(7, 11).to(dtype)
    other = tensor.clone()
    other[3, 4] = 0
    assert summarize(tensor).same_bits(summarize(tensor.t().contiguous().t()))
    assert not summarize(tensor).same_bits(summarize(other))


def test_sample_places_are_distinct_and_inside():
    for numel in (0, 1, 63, 64, 65, 1000):
        places = sample_places(numel)
        assert len(set(places)) == len(places) == min(numel, 64)
        assert all(0 <= place < numel for place in places)
