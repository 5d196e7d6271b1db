"""File names with a rank in them, as frameworks write them, and names that only look so."""

from __future__ import annotations

import pytest

from ckptkit.core.rank_names import rank_of


@pytest.mark.parametrize(
    ("name", "rank", "world_size", "stem"),
    [
        ("model_world_size_4_rank_2.pt", 2, 4, "model_world_size_4_rank_{}.pt"),
        ("pytorch_model_fsdp_0_rank1.bin", 1, None, "pytorch_model_fsdp_0_rank{}.bin"),
        ("rank_00012.pt", 12, None, "rank_{}.pt"),
        ("optim-rank3.pt", 3, None, "optim-rank{}.pt"),
        ("model.r1.pt", 1, None, "model.r{}.pt"),
    ],
)
def test_ranks(name: str, rank: int, world_size: int | None, stem: str) -> None:
    found = rank_of(name)
    assert found is not None and (found.rank, found.world_size, found.stem) == (rank, world_size, stem)


@pytest.mark.parametrize("name", ["model.pt", "checkpoint-3", "frank1.pt", "model_v2.pt", "error2.pt"])
def test_names_without_a_rank(name: str) -> None:
    assert rank_of(name) is None
