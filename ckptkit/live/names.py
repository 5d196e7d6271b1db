"""Clean names of a live module's parameters and saved buffers, whatever wraps it, and which of them are tied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..core.fqn import clean


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Parameters and persistent buffers by clean name, each once under its first; `aliases` are the other names."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]
    frozen: frozenset[str]


def module_names(model: nn.Module) -> ModuleNames:
    """The names of `model.state_dict()`, without a DDP wrapper and without the parts that other wrappers add."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    persistent = {clean(fqn) for fqn in _persistent(inner)}
    owners: dict[int, str] = {}
    aliases: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for fqn, parameter in inner.named_parameters(remove_duplicate=False):
        if _is_new(parameter, clean(fqn), owners, aliases):
            parameters[clean(fqn)] = parameter
    for fqn, buffer in inner.named_buffers(remove_duplicate=False):
        if clean(fqn) in persistent and _is_new(buffer, clean(fqn), owners, aliases):
            buffers[clean(fqn)] = buffer
    frozen = frozenset(fqn for fqn, parameter in parameters.items() if not parameter.requires_grad)
    return ModuleNames(parameters, buffers, aliases, frozen)


def _is_new(tensor: torch.Tensor, fqn: str, owners: dict[int, str], aliases: dict[str, str]) -> bool:
    owner = owners.setdefault(id(tensor), fqn)
    if owner != fqn:
        aliases[fqn] = owner
    return owner == fqn


def _persistent(model: nn.Module) -> list[str]:
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        found += [f"{dot}{name}" for name in module._buffers if name not in module._non_persistent_buffers_set]
    return found
