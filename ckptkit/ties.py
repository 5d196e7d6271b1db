"""Tied weights that files do not record: two names with equal values, one of them unknown to the optimizer."""

from __future__ import annotations

from dataclasses import replace

from .core.compare import compare
from .core.spec import Tensor, TensorKey
from .io.move import differ, move
from .opened import OpenCheckpoint


def with_ties(checkpoint: OpenCheckpoint) -> OpenCheckpoint:
    """The checkpoint with such pairs as aliases.

    DCP directories and sharded FSDP1 files store a tied weight whole under both names, and the optimizer has the first
    name alone; read as they are, the second looks like a frozen parameter of its own. A matrix that is in no parameter
    group and equals, in every bit, a trained one of the same shape is the same tensor: training moves one and not the
    other. Vectors are left alone (a frozen and a trained bias may both still be zeros).
    """
    trained: dict[tuple[tuple[int, ...], str], list[tuple[TensorKey, Tensor]]] = {}
    strangers: list[tuple[TensorKey, Tensor]] = []
    for key, tensor in checkpoint.entries.items():
        if key.slot == "value" and len(tensor.spec.shape) > 1 and tensor.spec.numel:
            if tensor.spec.role == "param":
                trained.setdefault((tensor.spec.shape, tensor.spec.dtype), []).append((key, tensor))
            elif tensor.spec.role == "frozen":
                strangers.append((key, tensor))
    if not checkpoint.param_groups or not strangers:
        return checkpoint
    found: dict[str, str] = {}
    for key, tensor in strangers:
        for owner, other in trained.get((tensor.spec.shape, tensor.spec.dtype), []):
            if compare(tensor, other, move, differ, first_only=True) is None:
                found[key.fqn] = owner.fqn
                break
    if not found:
        return checkpoint
    said = ", ".join(f"{alias} = {owner}" for alias, owner in list(found.items())[:4])
    return replace(
        checkpoint,
        entries={key: tensor for key, tensor in checkpoint.entries.items() if key.fqn not in found},
        aliases={**checkpoint.aliases, **found},
        warnings=(*checkpoint.warnings, f"tied weights, by equal values: {said}"),
    )
