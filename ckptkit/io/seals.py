"""The checksums that torch writes beside each storage (CRC-32 of a zip record), held against the bytes that were read.

`torch.load` does not look at them (measured, torch 2.13: a flipped bit of a weight loads without a word).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ..core.spec import Place, Tensor
from ..errors import SourceError
from .places import FileExtent, Seal

_CHUNK = 8 << 20


def check_seals(
    tensors: Iterable[Tensor], *, workers: int = 2, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Reads every sealed storage of the tensors once and holds it against its checksum.

    Storages without a checksum (safetensors, legacy torch files, files saved with `set_crc32_options(False)`, inflated
    entries) are passed over. Raises SourceError with each damaged storage as a fault.
    """
    seals = sorted({seal for tensor in tensors for piece in tensor.pieces for seal in seals_of(piece.place)})
    total, done, faults = sum(seal.nbytes for seal in seals), 0, []
    with ThreadPoolExecutor(workers) as threads:
        for seal, intact in zip(seals, threads.map(_intact, seals), strict=True):
            done += seal.nbytes
            progress(done, total)
            if not intact:
                faults.append(f"{seal.path}: the storage of {seal.nbytes:,} bytes at {seal.start:,}")
    if faults:
        raise SourceError(
            f"the source is damaged: {len(faults)} of {len(seals)} storages do not match their checksums",
            why="bytes changed after torch had written them: a bad disk, an interrupted or a partial copy",
            hint="copy the checkpoint again, or take another step's; --check structure converts it as it is",
            faults=faults[:20],
        )


def seals_of(place: Place | None) -> Iterator[Seal]:
    """The seals of a place and of what it is cut from."""
    while place is not None:
        if isinstance(place, FileExtent) and place.seal is not None:
            yield place.seal
        place = getattr(place, "base", None)


def _intact(seal: Seal) -> bool:
    crc, at, end = 0, seal.start, seal.start + seal.nbytes
    buffer = memoryview(bytearray(min(_CHUNK, seal.nbytes)))
    extent = FileExtent(seal.path, 0)
    while at < end:
        part = buffer[: min(len(buffer), end - at)]
        extent.read_into(at, part)
        crc = zlib.crc32(part, crc)
        at += len(part)
    return crc == seal.crc
