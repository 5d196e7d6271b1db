"""Which kind of live model it is: the folder is asked, sharded kinds before plain."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import deepspeed, fsdp1, fsdp2, plain
from .holder import Live

_KINDS = (deepspeed, fsdp1, fsdp2, plain)


def adapt(model: nn.Module, optimizer: torch.optim.Optimizer | Any | None) -> Live:
    """What this rank holds of the model and the optimizer.

    Raises UsageError for an optimizer that was made before the model was sharded, or an empty (meta) model.
    """
    kind = next(module for module in _KINDS if module.matches(model))
    return kind.adapt(model, optimizer)
