"""A model and batches as a user would bring them: a transformers model that answers an object with `.loss`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fixtures.huggingface import LENGTH, ROWS, VOCABULARY, tiny_gpt2


def model() -> nn.Module:
    return tiny_gpt2()


def batch(step: int) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward."""
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": rows, "labels": rows}
