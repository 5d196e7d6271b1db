"""The allow-list: which names in a pickle mean something to ckptkit, and which can only be there to run something.

Sources: `_get_allowed_globals` in torch/_weights_only_unpickler.py (2.13), and the globals seen in checkpoints written
by torch 1.13 to 2.13 and DeepSpeed 0.8 to 0.19. Nothing in a pickle is imported: a name is either built here, or
becomes an inert stand-in, or is refused.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ..core.dtype import ITEMSIZE
from ..core.tree import Opaque
from .standin import Standin, standin_class

# Modules and names whose only use in a data file is to run something, or to get hold of what does.
_ATTACK_MODULES = frozenset(
    "os posix nt subprocess sys importlib runpy shutil socket ctypes pty code codeop timeit pickle _pickle cPickle "
    "dill cloudpickle marshal webbrowser asyncio multiprocessing threading _thread signal pdb bdb trace cProfile "
    "profile platform tempfile imp zipimport commands popen2 operator _operator types inspect gc "
    "linecache pip pkgutil smtplib urllib http ftplib telnetlib xmlrpc sqlite3 site".split()
)
_ATTACK_BUILTINS = frozenset(
    "eval exec compile execfile open file input raw_input __import__ reload breakpoint apply map filter reduce "
    "setattr delattr globals locals vars dir exit quit help print iter next super classmethod staticmethod "
    "property __build_class__".split()
)
# Classes of the modules above that hold data only: they become stand-ins instead of errors.
_HARMLESS = frozenset({("types", "SimpleNamespace"), ("signal", "Signals"), ("http", "HTTPStatus")})
_ATTACK_NAMES = frozenset(
    {
        ("torch", "load"), ("torch.hub", "load"), ("torch.jit", "load"), ("torch.serialization", "load"),
        ("numpy", "load"), ("joblib", "load"), ("functools", "reduce"), ("torch.utils.cpp_extension", "load"),
        ("torch._dynamo.guards", "eval"), ("torch.storage", "_load_from_bytes"), ("numpy.testing", "runstring"),
        ("numpy.testing._private.utils", "runstring"), ("torch.utils._config_module", "load_config"),
        ("torch.distributed.rpc", "rpc_sync"), ("torch.fx.graph", "_exec_with_source"),
    }
)  # fmt: skip


_Class = TypeVar("_Class", bound=type)


def _sealed(cls: _Class) -> _Class:
    """Keep a pickle's BUILD opcode from changing an object: frozen slotted dataclasses have a `__setstate__` that does.

    Without it a crafted file could turn every later file's float storages into integer ones, or point one of its own
    storages at another file of this machine.
    """

    def refuse(self: object, state: object) -> None:
        raise AttributeError(f"a {cls.__name__} cannot be changed")

    cls.__setstate__ = refuse  # type: ignore[attr-defined]
    return cls


@_sealed
@dataclass(frozen=True, slots=True)
class StorageType:
    """The type of a storage in a persistent id; `dtype` is None for an untyped one."""

    dtype: str | None


def dtype_of(kind: object) -> str | None:
    """The element type of a storage in a persistent id; None for an untyped one."""
    if isinstance(kind, StorageType):
        return kind.dtype
    raise ValueError(f"a storage of the unknown type {kind!r}")


@_sealed
@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of a torch file: its key, element type, length, and where its bytes are (`path`, `offset`).

    `crc` is the CRC-32 of its bytes where the file keeps one.
    """

    key: str
    dtype: str | None
    nbytes: int
    path: str
    offset: int
    crc: int | None = None


@_sealed
@dataclass(frozen=True, slots=True)
class TensorStub:
    """A tensor as a pickle describes it: a storage, an offset and strides in elements. No bytes are read."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False


class Function:
    """A function that a pickle may call. Slots and `__setstate__` keep a pickle from changing it."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("functions of the allow-list cannot be changed")

    def __setstate__(self, state: object) -> None:
        raise AttributeError("functions of the allow-list cannot be changed")


def _rebuild_tensor(storage: Storage, offset: int, size: Any, stride: Any, *_: Any) -> TensorStub:
    if storage.dtype is None:
        raise ValueError("a tensor over an untyped storage without a dtype")
    return TensorStub(storage, storage.dtype, int(offset), tuple(map(int, size)), tuple(map(int, stride)))


def _rebuild_tensor_v2(
    storage: Storage, offset: int, size: Any, stride: Any, requires_grad: bool = False, *_: Any
) -> TensorStub:
    stub = _rebuild_tensor(storage, offset, size, stride)
    return TensorStub(storage, stub.dtype, stub.offset, stub.shape, stub.stride, bool(requires_grad))


def _rebuild_tensor_v3(
    storage: Storage, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: torch.dtype, *_: Any
) -> TensorStub:
    name = str(dtype).removeprefix("torch.")
    return TensorStub(storage, name, int(offset), tuple(map(int, size)), tuple(map(int, stride)), bool(requires_grad))


def _rebuild_parameter(data: Any, requires_grad: Any = True, *_: Any) -> Any:
    if isinstance(data, TensorStub):
        return TensorStub(data.storage, data.dtype, data.offset, data.shape, data.stride, bool(requires_grad))
    return data


def _rebuild_from_type_v2(function: Any, kind: Any, args: Any, state: Any = None) -> Any:
    made = function(*args)
    if isinstance(made, Standin) and state is not None:
        # A wrapper subclass such as DTensor keeps its parts in its attributes.
        made.__setstate__(state)
    return made


def _rebuild_wrapper_subclass(kind: Any, *args: Any) -> Any:
    """A tensor of a class of its own (DTensor, ShardedTensor): its stand-in, with dtype, size, ... as `args`."""
    if not (isinstance(kind, type) and issubclass(kind, Standin)):
        raise ValueError(f"a wrapper subclass of {kind!r}")
    return kind(*args)


def _no_storage(name: str) -> Callable[..., Opaque]:
    return lambda *args, **kwargs: Opaque(name)


class NumpyDtype:
    """A NumPy dtype by its description; only plain numbers and booleans are understood."""

    __slots__ = ("dtype",)

    def __init__(self, text: Any, *_: Any) -> None:
        self.dtype = np.dtype(text) if isinstance(text, str) and np.dtype(text).kind in "biufcSU" else None

    def __setstate__(self, state: Any) -> None:
        if self.dtype is not None and state[1] in "<>":
            self.dtype = self.dtype.newbyteorder(state[1])


class NumpyArray:
    """A NumPy array that a pickle describes; `value` is the array, or None where its dtype is not a plain number."""

    __slots__ = ("value",)

    def __init__(self, *_: Any) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, data = state[-5:]
        if kind.dtype is not None:
            data = data.encode("latin1") if isinstance(data, str) else data
            self.value = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if fortran else "C").copy()


def _numpy_from_buffer(buffer: Any, kind: Any, shape: Any, order: Any) -> NumpyArray:
    array = NumpyArray()
    if kind.dtype is not None:
        array.value = np.frombuffer(bytes(buffer), kind.dtype).reshape(shape, order=order).copy()
    return array


def _numpy_scalar(kind: NumpyDtype, data: Any = b"") -> Any:
    if kind.dtype is None:
        return Opaque("numpy scalar of an object dtype")
    data = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(data, kind.dtype)[0].item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode(encoding if encoding in ("latin1", "utf-8", "ascii") else "latin1")


def _container(kind: Callable[..., Any]) -> Function:
    """A container made of what the pickle holds already: a length or a range would make a bomb of a few bytes."""

    def make(items: Any = (), *rest: Any) -> Any:
        if rest or not isinstance(items, list | tuple | set | frozenset | dict):
            raise ValueError(f"a {kind.__name__} of a {type(items).__name__}")
        return kind(items)

    return Function(make)


def _bytes(kind: Callable[..., Any]) -> Function:
    """Python 2's protocols write bytes as text with an encoding. A number would ask for that many zeros."""

    def make(data: Any = b"", encoding: str = "latin1", *_: Any) -> Any:
        if not isinstance(data, str | bytes | bytearray | list):
            raise ValueError(f"bytes of a {type(data).__name__}")
        return kind(_encode(data, encoding) if isinstance(data, str) else data)

    return Function(make)


def _builtins() -> dict[str, Any]:
    made: dict[str, Any] = {kind.__name__: _container(kind) for kind in (set, frozenset, list, dict, tuple)}
    made |= {kind.__name__: _bytes(kind) for kind in (bytes, bytearray)}
    plain: tuple[type, ...] = (int, float, complex, bool, str, slice, range)
    made |= {kind.__name__: Function(kind) for kind in plain}
    # Python 2's names, which protocols up to 2 still write.
    return {**made, "xrange": made["range"], "unicode": made["str"], "long": made["int"]}


def _default_dict(factory: Any = None, *items: Any) -> dict[Any, Any]:
    return dict(*items)


def _named_member(owner: Any, name: Any) -> type[Standin]:
    """Stands for `getattr(Class, "member")`, by which ShardedTensor's metadata names enum members and nested classes:
    only the name is kept, and nothing is looked up."""
    return standin_class(str(getattr(owner, "kind", owner)), str(name))


def _functions() -> dict[tuple[str, str], Any]:
    rebuild: dict[str, Callable[..., Any]] = {
        "_rebuild_tensor": _rebuild_tensor,
        "_rebuild_tensor_v2": _rebuild_tensor_v2,
        "_rebuild_tensor_v3": _rebuild_tensor_v3,
        "_rebuild_parameter": _rebuild_parameter,
        "_rebuild_parameter_with_state": _rebuild_parameter,
        "_rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
        "_rebuild_sparse_tensor": _no_storage("sparse tensor"),
        "_rebuild_nested_tensor": _no_storage("nested tensor"),
        "_rebuild_qtensor": _no_storage("quantized tensor"),
        "_rebuild_meta_tensor_no_storage": _no_storage("tensor on the meta device"),
    }
    table: dict[tuple[str, str], Any] = {("torch._utils", name): Function(call) for name, call in rebuild.items()}
    table |= {
        ("torch._tensor", "_rebuild_from_type_v2"): Function(_rebuild_from_type_v2),
        ("torch", "Size"): Function(lambda sizes=(): tuple(sizes)),
        ("torch", "device"): Function(lambda *parts: ":".join(map(str, parts))),
        ("torch.serialization", "_get_layout"): Function(lambda name: Opaque(str(name))),
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): Function(_default_dict),
        ("collections", "Counter"): Function(lambda items=(): dict(items)),
        ("collections", "deque"): Function(lambda items=(), size=None: list(items)),
        ("_codecs", "encode"): Function(_encode),
        ("numpy", "dtype"): Function(NumpyDtype),
        ("numpy", "ndarray"): standin_class("numpy", "ndarray"),
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table[module, "_reconstruct"] = Function(NumpyArray)
        table[module, "scalar"] = Function(_numpy_scalar)
    for module in ("numpy.core.numeric", "numpy._core.numeric"):
        table[module, "_frombuffer"] = Function(_numpy_from_buffer)
    for module in ("builtins", "__builtin__"):
        table |= {(module, name): value for name, value in _builtins().items()}
        table[module, "getattr"] = Function(_named_member)
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path"):
            table[module, name] = Function(lambda *parts: "/".join(map(str, parts)))
    table |= {("torch", name): getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
    table |= _storage_types()
    return table


def _storage_types() -> dict[tuple[str, str], StorageType]:
    names = {
        "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
        "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
        "ComplexDouble": "complex128", "ComplexFloat": "complex64", "QInt8": "int8", "QUInt8": "uint8",
        "QInt32": "int32",
    }  # fmt: skip
    table = {
        (module, f"{name}Storage"): StorageType(dtype)
        for name, dtype in names.items()
        for module in ("torch", "torch.cuda")
    }
    table["torch.storage", "UntypedStorage"] = StorageType(None)
    table["torch", "UntypedStorage"] = StorageType(None)
    return table


_TABLE = _functions()


def known(module: str, name: str) -> Any:
    """What the allow-list has for a global, or None."""
    return _TABLE.get((module, name))


def is_attack(module: str, name: str) -> bool:
    """Whether a global could only be in a checkpoint in order to run something."""
    if (module, name) in _HARMLESS:
        return False
    if module in ("builtins", "__builtin__"):
        return name.partition(".")[0] in _ATTACK_BUILTINS
    return module.partition(".")[0] in _ATTACK_MODULES or (module, name) in _ATTACK_NAMES
