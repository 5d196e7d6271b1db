"""Whether the chunks of a tensor are all of it, each element once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.box import Box, Shape, uncovered, whole


def chunk_faults(shape: Shape, boxes: Iterable[Box]) -> Iterator[str]:
    """What is wrong with the chunks of a tensor: one outside of it, elements in none, elements in two.

    A box that occurs twice is a replica and no fault.
    """
    chunks = [box for box in dict.fromkeys(boxes) if box.numel]
    outside = [box for box in chunks if len(box.sizes) != len(shape) or not whole(shape).holds(box)]
    for box in outside:
        yield f"its chunk at {box.offsets} of size {box.sizes} is outside of {shape}"
    if outside:
        return
    # In order, so that what is left uncovered stays one box for all usual shardings.
    chunks.sort(key=lambda box: box.offsets)
    missing, hole = uncovered(shape, chunks)
    total = whole(shape).numel
    if missing and hole is not None:
        yield f"{missing} of its {total} elements are in no chunk, the first at {hole.offsets}"
    doubled = sum(box.numel for box in chunks) - (total - missing)
    if doubled:
        first, second = _overlap(chunks)
        yield f"{doubled} elements are in two chunks, at {first.offsets} and at {second.offsets}"


def _overlap(chunks: list[Box]) -> tuple[Box, Box]:
    return next((a, b) for i, a in enumerate(chunks) for b in chunks[i + 1 :] if a & b)
