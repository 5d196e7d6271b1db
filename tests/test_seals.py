"""A bit that flipped on the disk is found by torch's own checksums, in every format that has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.serialization import set_crc32_options

import ckptkit
from ckptkit.errors import SourceError
from ckptkit.io.places import FileExtent, Seal
from ckptkit.io.seals import seals_of

from .truth import truth_of

SOURCES = ("ddp-full", "fsdp1-ranks", "fsdp1-local", "fsdp2-dcp", "fsdp2-ranks", "zero0", "zero2", "zero3",
           "universal-zero2")  # fmt: skip


def seals_in(path: Path, model: str | None) -> list[Seal]:
    """The seals of all places; DCP's are known once a tensor has been read."""
    tensors = ckptkit.open(path, model=ckptkit.io.model.describe(model) if model else None).entries.values()
    for tensor in tensors:
        for piece in tensor.pieces:
            piece.place.read_into(0, memoryview(bytearray(0)))
    return [seal for tensor in tensors for piece in tensor.pieces for seal in seals_of(piece.place) if seal.nbytes > 8]


@pytest.mark.parametrize("name", SOURCES)
def test_one_flipped_bit_of_any_storage(name: str, fixture_dir: Callable[[str], Path], tmp_path: Path) -> None:
    truth = truth_of(fixture_dir(name))
    source = tmp_path / "source"
    (shutil.copytree if truth.path.is_dir() else shutil.copy)(truth.path, source)
    ckptkit.convert(source, tmp_path / "intact.pt", to="full", model=truth.model)
    seals = seals_in(source, truth.model)
    assert seals
    # The largest are sharded: what ranks hold alike is compared among them, which finds the bit before.
    for number, seal in enumerate(sorted(set(seals), key=lambda seal: -seal.nbytes)[:4]):
        path = Path(seal.path)
        data = path.read_bytes()
        at = seal.start + seal.nbytes // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        target = tmp_path / f"out{number}.pt"
        with pytest.raises(SourceError, match="checksums") as caught:
            ckptkit.convert(source, target, to="full", model=truth.model)
        assert str(path) in caught.value.faults[0]
        assert not target.exists()
        ckptkit.convert(source, target, to="full", model=truth.model, check="structure")  # asked for: as it is
        path.write_bytes(data)


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path: Path) -> None:
    weights = {"w": torch.arange(64.0), "b": torch.zeros(3)}
    set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "a.pt")
    finally:
        set_crc32_options(True)
    ckptkit.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="full")
    assert torch.equal(torch.load(tmp_path / "b.pt")["model"]["w"], weights["w"])


def test_a_place_in_a_file_says_whose_part_it_is(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(64.0)[16:32]}, tmp_path / "a.pt")
    tensor = next(iter(ckptkit.open(tmp_path / "a.pt").entries.values()))
    place = tensor.pieces[0].place
    assert isinstance(place, FileExtent) and place.seal is not None
    assert (place.offset - place.seal.start, place.seal.nbytes) == (64, 256)
