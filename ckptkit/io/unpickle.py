"""The restricted unpickler: builds plain containers, tensor stubs and inert stand-ins; imports and calls nothing."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from ..core.tree import Opaque, Tree
from ..errors import SourceError, UnsafePickleError
from .globals import Function, NumpyArray, NumpyDtype, Storage, StorageType, TensorStub, is_attack, known
from .opcodes import end_of, one_pickle
from .standin import Standin, standin_class

_DEEPEST = 100  # levels of containers; what reads and writes trees is recursive
_SHARED = 10_000_000  # values that shared containers may add when each place gets its own copy


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
    try:
        stream = data[: end_of(data)] if isinstance(data, bytes) else one_pickle(data)
        value = _Restricted(io.BytesIO(stream), source, persistent_load).load()
    except SourceError:
        raise
    except Exception as error:
        # Whatever a damaged or crafted stream makes the pickle machine say (it has no error class of its own).
        raise SourceError(
            f"{source} cannot be read as a pickle",
            why=f"{type(error).__name__}: {error}",
            hint="the file is damaged or is no torch file; copy it again from where it was written",
        ) from error
    _check_nesting(value, source)
    return value


def _inner(value: Any) -> list[Any] | None:
    """What a container holds, None for a leaf. A stand-in's state is never looked into."""
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Standin):
        return [*value.items.values(), *value.elements]
    return None


def _check_nesting(root: Any, source: str) -> None:
    """Refuse trees that no recursion could walk: too deep, holding themselves, or doubling at every level.

    Every container is entered once, without recursion, and knows its height and its size as a tree.
    """
    known: dict[int, tuple[int, int]] = {}
    open_ids: set[int] = set()
    total = 0
    stack: list[tuple[Any, list[Any] | None]] = [(root, None)]
    while stack:
        value, children = stack.pop()
        if children is None:
            children = _inner(value)
            if children is None or id(value) in known:
                continue
            if id(value) in open_ids:
                raise _tangled(source, "a container holds itself")
            open_ids.add(id(value))
            total += 1 + len(children)
            children = [child for child in children if _inner(child) is not None]
            stack.append((value, children))
            stack += [(child, None) for child in children]
            continue
        inner = [known[id(child)] for child in children]
        size = len(_inner(value) or ()) + 1 + sum(size for _, size in inner)
        known[id(value)] = (1 + max((height for height, _ in inner), default=0), size)
        open_ids.discard(id(value))
        if known[id(value)][0] > _DEEPEST:
            raise _tangled(source, f"containers are nested more than {_DEEPEST} deep")
    if id(root) in known and known[id(root)][1] > 2 * total + _SHARED:
        raise _tangled(source, "shared containers make a tree of more than ten million values")


def _tangled(source: str, why: str) -> SourceError:
    return SourceError(
        f"{source} holds a structure that cannot be carried",
        why=why,
        hint="no checkpoint looks like this; if yours does, save the part that is needed by itself",
    )


def as_tree(value: Any, tensor: Callable[[TensorStub], Any]) -> Tree:
    """Turn what `unpickle` built into a tree: stubs through `tensor`, dict subclasses into dicts, the rest Opaque.

    A dict with keys that are no plain values (members of somebody's enum) is Opaque, and so is such a set.
    """
    if isinstance(value, TensorStub):
        return tensor(value)
    if isinstance(value, NumpyArray):
        return value.value if value.value is not None else Opaque("numpy.ndarray of objects")
    if isinstance(value, Standin):
        if value.items and not value.elements and all(map(_is_plain, value.items)):
            return {key: as_tree(child, tensor) for key, child in value.items.items()}
        return Opaque(_kind(value))
    if isinstance(value, dict):
        # Not value.items(): a pickle can put attributes on an OrderedDict.
        strange = next((key for key in value if not _is_plain(key)), None)
        if strange is not None:
            return Opaque(f"dict with keys of {_kind(strange)}")
        return {key: as_tree(child, tensor) for key, child in dict.items(value)}
    if isinstance(value, list):
        return [as_tree(child, tensor) for child in value]
    if isinstance(value, tuple):
        return tuple(as_tree(child, tensor) for child in value)
    if isinstance(value, set | frozenset) and not all(map(_is_plain, value)):
        return Opaque(f"{type(value).__name__} of objects")
    if isinstance(value, _PARTS):
        return Opaque(_kind(value))
    return value


_PARTS = (type, Storage, StorageType, Function, NumpyDtype)
"""What the allow-list puts on the pickle machine's stack for its own use: as a value it is a class or a function."""


def _is_plain(value: Any) -> bool:
    """Whether a key or a member of a set is a plain value: hashable, and the same in every program."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype)


def _kind(value: object) -> str:
    """The class that an object of the pickle is of, by the name that it was pickled under."""
    if isinstance(value, Standin):
        # Protocols 0 and 1 pickle an object as a call of copyreg's function with the class.
        owner = value.args[0] if type(value).kind in _RECONSTRUCTORS and value.args else type(value)
        return str(getattr(owner, "kind", type(value).kind))
    if isinstance(value, type):
        return str(getattr(value, "kind", value.__name__))
    return type(value).__name__.lstrip("_").lower()


_RECONSTRUCTORS = ("copyreg._reconstructor", "copy_reg._reconstructor")
