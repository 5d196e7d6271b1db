"""The restricted unpickler: builds plain containers, tensor stubs and inert stand-ins; imports and calls nothing."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from ..core.tree import Opaque, Tree
from ..errors import SourceError, UnsafePickleError
from .globals import NumpyArray, TensorStub, is_attack, known
from .standin import Standin, standin_class

_BROKEN = (pickle.UnpicklingError, EOFError, IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError)


class _Restricted(pickle.Unpickler):
    def __init__(self, file: BinaryIO, source: str, persistent_load: Callable[[Any], Any] | None) -> None:
        super().__init__(file, encoding="latin1")
        self._source = source
        self._persistent_load = persistent_load
        self._classes: dict[tuple[str, str], type[Standin]] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = known(module, name)
        if found is not None:
            return found
        if is_attack(module, name):
            raise UnsafePickleError(
                f"{self._source} names {module}.{name}, which could only be there to run something",
                why="a checkpoint holds data; this global is not needed to hold any",
                hint="do not load this file with torch.load; ask where it comes from. Nothing of it was run",
            )
        return self._classes.setdefault((module, name), standin_class(module, name))

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise pickle.UnpicklingError("a reference to data outside of the pickle")
        return self._persistent_load(pid)


def unpickle(data: bytes | BinaryIO, source: str, *, persistent_load: Callable[[Any], Any] | None = None) -> Any:
    """Read one pickle without importing or calling anything that it names.

    Returns plain containers and values, `TensorStub`s, `Standin`s for objects of unknown classes. Raises
    UnsafePickleError for a global that could only run something, SourceError for a stream that is no pickle.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return _Restricted(file, source, persistent_load).load()
    except (SourceError, RecursionError):
        raise
    except _BROKEN as error:
        raise SourceError(
            f"{source} cannot be read as a pickle",
            why=f"{type(error).__name__}: {error}",
            hint="the file is damaged or is no torch file; copy it again from where it was written",
        ) from error


def as_tree(value: Any, tensor: Callable[[TensorStub], Any]) -> Tree:
    """Turn what `unpickle` built into a tree: stubs through `tensor`, dict subclasses into dicts, the rest Opaque."""
    if isinstance(value, TensorStub):
        return tensor(value)
    if isinstance(value, NumpyArray):
        return value.value if value.value is not None else Opaque("numpy.ndarray of objects")
    if isinstance(value, Standin):
        if value.items and not value.elements:
            return {key: as_tree(child, tensor) for key, child in value.items.items()}
        return Opaque(type(value).kind)
    if isinstance(value, Mapping):
        return {key: as_tree(child, tensor) for key, child in value.items()}
    if isinstance(value, list):
        return [as_tree(child, tensor) for child in value]
    if isinstance(value, tuple):
        return tuple(as_tree(child, tensor) for child in value)
    if isinstance(value, type):
        return Opaque(getattr(value, "kind", value.__name__))
    return value
