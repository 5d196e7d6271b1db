"""Dtypes by name: sizes and casts against torch's own."""

from __future__ import annotations

import pytest
import torch

from ckptkit.core.dtype import ITEMSIZE, is_float, is_lossless, named


@pytest.mark.parametrize("name", ITEMSIZE)
def test_sizes_are_torchs(name: str) -> None:
    dtype = getattr(torch, name)
    assert ITEMSIZE[name] == dtype.itemsize and named(str(dtype)) == name
    assert is_float(name) == dtype.is_floating_point


@pytest.mark.parametrize(("text", "name"), [("bf16", "bfloat16"), ("torch.float16", "float16"), ("fp32", "float32")])
def test_usual_spellings(text: str, name: str) -> None:
    assert named(text) == name


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        named("int3")


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32", "float64"])
def test_lossless_is_what_torch_shows_for_every_16_bit_value(source: str, target: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    kind = getattr(torch, source)
    if ITEMSIZE[source] == 2:
        values = bits.view(kind)
    else:
        # 16-bit values say nothing of what a wider one loses: add ones that only the wider holds.
        more = torch.tensor([1 + 2.0**-20, 1e300 if source == "float64" else 3e38, 1 + 2.0**-40], dtype=torch.float64)
        values = torch.cat([bits.view(torch.bfloat16).to(kind), more.to(kind)])
    values = values[~values.isnan()]
    assert torch.equal(values.to(getattr(torch, target)).to(kind), values) == is_lossless(source, target)
