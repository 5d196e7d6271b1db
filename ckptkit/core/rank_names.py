"""File names that carry a rank: which files belong together, and which rank and world size each one says it is of."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORLD = re.compile(r"world[_-]?size[_-]?(\d+)|(?<![a-z])ws[_-]?(\d+)", re.IGNORECASE)
_RANK = re.compile(r"(?<![a-z])rank[_-]?(\d+)|(?<=[_.-])r(\d+)(?=[_.-])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankName:
    """What a name says: `stem` is the name with the rank's digits cut out, equal for files that belong together."""

    stem: str
    rank: int
    world_size: int | None


def rank_of(name: str) -> RankName | None:
    """The rank that a file name carries, or None.

    >>> rank_of("model_world_size_4_rank_2.pt")
    RankName(stem='model_world_size_4_rank_{}.pt', rank=2, world_size=4)
    >>> rank_of("pytorch_model_fsdp_0_rank1.bin").rank
    1
    >>> rank_of("model.pt") is None
    True
    """
    found = _RANK.search(name)
    if found is None:
        return None
    group = 1 if found.group(1) is not None else 2
    world = _WORLD.search(name)
    size = next((int(text) for text in world.groups() if text), None) if world else None
    return RankName(name[: found.start(group)] + "{}" + name[found.end(group) :], int(found.group(group)), size)
