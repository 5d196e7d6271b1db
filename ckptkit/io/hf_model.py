"""The order of a Hugging Face model's parameters, from its `config.json`: transformers builds it on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def parameter_order(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of `model.named_parameters()` for a parsed `config.json`; None without transformers or its class.

    No code of the checkpoint is run: only classes that transformers ships are looked up by name.
    """
    try:
        import torch
        import transformers
    except ImportError:
        return None
    names = config.get("architectures") or []
    factory = getattr(transformers, str(names[0]), None) if names else None
    if factory is None or not hasattr(factory, "config_class"):
        return None
    with torch.device("meta"):
        model = factory(factory.config_class.from_dict(dict(config)))
    return tuple(name for name, _ in model.named_parameters())
