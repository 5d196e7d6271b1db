"""Element types by name: the names of torch without `torch.`, their sizes in bytes, and which casts lose nothing."""

from __future__ import annotations

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
}

SHORT: dict[str, str] = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}

_WIDENS: dict[str, frozenset[str]] = {
    "float32": frozenset({"float64"}),
    "float16": frozenset({"float32", "float64"}),
    "bfloat16": frozenset({"float32", "float64"}),
}


def named(text: str) -> str:
    """The full name of a dtype given in any usual spelling (`bf16`, `torch.bfloat16`, `bfloat16`).

    Raises KeyError for an unknown name.
    """
    name = text.removeprefix("torch.")
    name = SHORT.get(name, name)
    if name not in ITEMSIZE:
        raise KeyError(text)
    return name


def is_float(dtype: str) -> bool:
    """Whether a cast between this dtype and another float dtype is meaningful for weights."""
    return dtype.startswith(("float", "bfloat"))


def is_lossless(source: str, target: str) -> bool:
    """Whether every value of `source` is a value of `target`."""
    return source == target or target in _WIDENS.get(source, ())
