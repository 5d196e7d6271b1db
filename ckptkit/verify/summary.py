"""`TensorSummary` of a live tensor: norm, mean, checksum of the bytes and a fixed sample of values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from .trace import TensorSummary

SAMPLE = 64


def summarize(tensor: torch.Tensor) -> TensorSummary:
    """The summary of a whole tensor of any dtype and device.

    A DTensor is gathered first, which is a collective: then all ranks of its mesh must call this in the same order.
    """
    full = getattr(tensor, "full_tensor", None)
    whole = (full() if full is not None else tensor).detach().cpu().contiguous()
    values = whole.reshape(-1).double() if not whole.is_complex() else torch.view_as_real(whole).reshape(-1).double()
    places = sample_places(values.numel())
    return TensorSummary(
        shape=tuple(whole.shape),
        dtype=str(whole.dtype).removeprefix("torch."),
        norm=float(torch.linalg.vector_norm(values)) if values.numel() else 0.0,
        mean=float(values.mean()) if values.numel() else 0.0,
        checksum=checksum(whole),
        sample=tuple(float(values[i]) for i in places),
    )


def summarize_all(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorSummary]:
    """Summaries by name; takes a state dict or `named_parameters()`. Collective if a tensor is a DTensor."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: summarize(tensor) for name, tensor in items}


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits over the raw bytes of a CPU tensor, row-major."""
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def sample_places(numel: int) -> tuple[int, ...]:
    """Up to 64 flat indices, evenly spread, the same for equal `numel`."""
    if numel <= SAMPLE:
        return tuple(range(numel))
    return tuple(i * numel // SAMPLE for i in range(SAMPLE))
