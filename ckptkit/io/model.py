"""What only the model knows: parameters in order, buffers, ties, what is frozen, modules; built without memory."""

from __future__ import annotations

import importlib
import os
import sys

import torch
from torch import nn

from ..core.checkpoint import ModelFacts
from ..errors import UsageError


def describe(name: str) -> ModelFacts:
    """The facts of the model that `pkg.mod:factory` returns. `factory` takes nothing and is called on the meta device.

    This runs the user's own code, which is named by the user. Raises UsageError where it cannot be imported or does
    not answer a module.
    """
    return facts_of(_build(name))


def facts_of(model: nn.Module) -> ModelFacts:
    """The facts of a module. Shapes are those of its tensors as they are: give a model that is not wrapped."""
    owners: dict[int, str] = {}
    parameters: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    frozen: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            aliases[name] = owner
            continue
        parameters[name] = tuple(parameter.shape)
        if not parameter.requires_grad:
            frozen.add(name)
    saved = model.state_dict()
    buffers = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in saved}
    # With duplicates: a module that is used twice gives its parameters a name under each path.
    modules = {path: _classes(module) for path, module in model.named_modules(remove_duplicate=False)}
    return ModelFacts(parameters, buffers, aliases, frozenset(frozen), modules)


def _classes(module: nn.Module) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(module).__mro__ if kind not in (nn.Module, object))


def _build(name: str) -> nn.Module:
    module, _, factory = name.partition(":")
    if not module or not factory:
        raise UsageError(
            f"--model {name!r} names no factory",
            why="a module and a function in it are needed, with a colon between them",
            hint="--model pkg.mod:factory, as in train:build_model",
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        make = importlib.import_module(module)
        for part in factory.split("."):
            make = getattr(make, part)
        with torch.device("meta"):
            model = make()  # type: ignore[operator]
    except Exception as error:
        raise UsageError(
            f"the model {name} cannot be built",
            why=f"{type(error).__name__}: {error}",
            hint="the factory takes no arguments, and its module is found from the current folder or is installed",
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name} answered a {type(model).__name__}, not a torch.nn.Module",
            why="names and shapes are taken from the module itself",
            hint="name a function that takes no arguments and returns the model",
        )
    return model
