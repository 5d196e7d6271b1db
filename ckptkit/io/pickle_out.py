"""Pickles as torch writes them: tensors by reference to storages, classes by name, without importing the classes."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.dtype import ITEMSIZE
from ..core.gather import packed_strides
from ..core.place import Constant
from ..core.spec import Tensor
from ..core.tree import Opaque, TensorRef, Tree

_TYPED = {
    "float64": torch.DoubleStorage, "float32": torch.FloatStorage, "float16": torch.HalfStorage,
    "bfloat16": torch.BFloat16Storage, "int64": torch.LongStorage, "int32": torch.IntStorage,
    "int16": torch.ShortStorage, "int8": torch.CharStorage, "uint8": torch.ByteStorage, "bool": torch.BoolStorage,
    "complex128": torch.ComplexDoubleStorage, "complex64": torch.ComplexFloatStorage,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function by its qualified name. It need not be importable here."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.module}.{self.name} is only a name here")


@dataclass(frozen=True, slots=True)
class Call:
    """An object that unpickles as `function(*args)`, then takes `state` if there is one."""

    function: Global
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class StorageSlice:
    """A tensor inside a larger storage: `shape` elements from `offset` on, row-major, of the storage named `storage`.

    `storage` is what the writer of the file lays out under that name: any object it knows by identity.
    """

    storage: Any
    dtype: str
    numel: int
    shape: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    numel: int


# The pure-Python pickler is the only one that can write a name without importing it.
_PICKLER: Any = pickle._Pickler


class _TorchPickler(_PICKLER):
    def __init__(self, file: io.BytesIO, key_of: Callable[[Any], str]) -> None:
        super().__init__(file, protocol=2)
        self._key_of = key_of

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        typed = _TYPED.get(value.dtype)
        if typed is not None:
            return ("storage", Global("torch", typed.__name__), value.key, "cpu", value.numel)
        return (
            "storage", Global("torch.storage", "UntypedStorage"), value.key, "cpu",
            value.numel * ITEMSIZE[value.dtype],
        )  # fmt: skip

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # A small tensor inside an object of torch's own, such as the ranks of a device mesh.
            value = Tensor.at(Constant(value.numpy().tobytes()), tuple(value.shape), str(value.dtype)[len("torch.") :])
        if isinstance(value, Tensor):
            value = StorageSlice(value, value.spec.dtype, value.spec.numel, value.spec.shape)
        if isinstance(value, StorageSlice):
            storage = _Storage(self._key_of(value.storage), value.dtype, value.numel)
            args: tuple[Any, ...] = (
                storage,
                value.offset,
                value.shape,
                packed_strides(value.shape),
                False,
                OrderedDict(),
            )
            if value.dtype in _TYPED:
                return Global("torch._utils", "_rebuild_tensor_v2"), args
            return Global("torch._utils", "_rebuild_tensor_v3"), (*args, getattr(torch, value.dtype), None)
        if isinstance(value, Call):
            return (value.function, value.args, *((value.state,) if value.state is not None else ()))
        if isinstance(value, Opaque | TensorRef):
            raise AssertionError(f"{value} must be dropped or resolved before it is written")
        return NotImplemented

    def _save_name(self, value: Global) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    dispatch = _PICKLER.dispatch.copy()
    dispatch[Global] = _save_name


def torch_pickle(tree: Tree, key_of: Callable[[Any], str]) -> bytes:
    """Pickle a tree as `data.pkl` of a torch file. `key_of` names the storage record of a Tensor (or of the `storage`
    of a StorageSlice) and is asked in the order in which they occur.
    """
    out = io.BytesIO()
    _TorchPickler(out, key_of).dump(tree)
    return out.getvalue()
