"""Fully qualified names of parameters, and the one place that knows the prefixes which wrappers put into them."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Parts that only a wrapper writes: FSDP1, activation checkpointing, torch.compile. Taken out wherever they stand.
_INNER = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
# Parts that an ordinary attribute may also have: taken off the front, and only where every key carries them.
_OUTER = ("module.", "_forward_module.")


def clean(fqn: str) -> str:
    """The name without the parts that FSDP1, activation checkpointing and torch.compile put into it.

    >>> clean("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.w")
    'layers.0.w'
    """
    return _INNER.sub("", fqn)


def common_prefix(fqns: Iterable[str]) -> str:
    """The outer wrapper prefixes (`module.`, `_forward_module.`, repeated) that every one of the names carries."""
    names = list(fqns)
    prefix = ""
    while names:
        part = next((p for p in _OUTER if all(name.startswith(prefix + p) for name in names)), None)
        if part is None:
            break
        prefix += part
    return prefix


def join(*parts: str) -> str:
    """Join the non-empty parts with dots.

    >>> join("", "layers.0", "w")
    'layers.0.w'
    """
    return ".".join(part for part in parts if part)
