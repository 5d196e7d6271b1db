"""Entries of `.distcp` files: each is a torch file of its own inside the file, opened when it is first read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from ..core.spec import Place, Tensor
from ..core.tree import Tree
from ..errors import MissingPackageError, SourceError
from ..io.places import FileExtent
from ..io.torch_file import load_tree, load_tree_of_bytes
from ._dcp_metadata import Entry

_ZSTD = "stream.zstd"
_KEPT = 4  # inflated entries kept: reads of one entry follow each other


def load_entry(root: Path, entry: Entry) -> Tree:
    """The object in an entry, tensors by their places. Raises SourceError, UnsafePickleError, MissingPackageError."""
    if entry.transforms:
        return load_tree_of_bytes(inflated(str(root / entry.file), entry), f"{root / entry.file} at {entry.offset}")
    return load_tree(root / entry.file, entry.offset, entry.length)


@dataclass(slots=True)
class EntryPlace:
    """The one tensor of an entry. Where its bytes begin stands in the entry's own zip directory, which is read at the
    first use: a checkpoint of a million entries opens without touching them."""

    root: Path
    entry: Entry
    shape: tuple[int, ...]
    dtype: str
    name: str
    _found: Place | None = field(default=None, repr=False)

    def read_into(self, start: int, buffer: memoryview) -> None:
        if self.entry.transforms:
            # Not kept: what was inflated is as large as the tensor.
            self._locate().read_into(start, buffer)
            return
        if self._found is None:
            self._found = self._locate()
        self._found.read_into(start, buffer)

    @property
    def base(self) -> Place | None:
        """Where the bytes lie, once they have been read."""
        return self._found

    def _locate(self) -> Place:
        tree = load_entry(self.root, self.entry)
        if not isinstance(tree, Tensor) or (tree.spec.shape, tree.spec.dtype) != (self.shape, self.dtype):
            found = f"{tree.spec.dtype} {tree.spec.shape}" if isinstance(tree, Tensor) else f"a {type(tree).__name__}"
            raise SourceError(
                f"{self.root / self.entry.file} at {self.entry.offset} is not the chunk of {self.name} that .metadata "
                f"says: {found} instead of {self.dtype} {self.shape}",
                why="the file belongs to another save, or .metadata does",
                hint="restore the files of one save",
            )
        return tree.pieces[0].place


_lock = threading.Lock()
_cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()


def inflated(path: str, entry: Entry) -> bytes:
    """The bytes of an entry before its transforms. Only zstd is known (`ZStandard` in torch's _extension.py)."""
    strange = [each for each in entry.transforms if each.partition("/")[0] != _ZSTD]
    if strange:
        raise SourceError(
            f"{path} is stored with a transform that is not known: {', '.join(strange)}",
            why="DCP wrote it with an extension of its user, and only zstd is torch's own",
            hint="load it with that extension and save it again without",
        )
    key = (path, entry.offset)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    data = bytearray(entry.length)
    FileExtent(path, entry.offset).read_into(0, memoryview(data))
    out = bytes(data)
    for _ in entry.transforms:
        out = _unzstd(out, f"{path} at {entry.offset}")
    with _lock:
        _cache[key] = out
        while len(_cache) > _KEPT:
            _cache.popitem(last=False)
    return out


def _unzstd(data: bytes, name: str) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise MissingPackageError("zstandard", needed_for=f"the compressed entry {name}", extra="zstd") from error
    try:
        inflated: bytes = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    except zstandard.ZstdError as error:
        raise SourceError(f"{name} is no zstd stream", why=str(error), hint="copy the checkpoint again") from error
    return inflated
