"""The names of a model before any wrapper touched it: owners, aliases, frozen parameters, buffers that are saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ..workload import Workload, build_model

# What FSDP1 and DDP put into names. Own models only: a module of the user's could really be called "module".
_FSDP1 = "_fsdp_wrapped_module."


@dataclass(frozen=True, slots=True)
class Names:
    """`shapes` is of every owned parameter, in the order of the model; `aliases` maps tied names to owners."""

    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]


def names_of(workload: Workload) -> Names:
    """Builds the plain model once more and reads its names."""
    model = build_model(workload, 0)
    owners = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return Names(
        shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
        aliases={name: owners[id(p)] for name, p in every if owners[id(p)] != name},
        frozen=tuple(name for name, p in model.named_parameters() if not p.requires_grad),
        buffers=tuple(saved_buffers(model)),
    )


def saved_buffers(model: nn.Module) -> Iterable[str]:
    """Clean names of the buffers that belong into a state dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield clean(f"{prefix}.{name}" if prefix else name)


def clean(name: str) -> str:
    """A name without what FSDP1 put into it."""
    return name.replace(_FSDP1, "")
