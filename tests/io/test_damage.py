"""Damaged files: cut anywhere or with flipped bits they are an error or read right, and nothing else ever happens."""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import SourceError
from ckptkit.io.places import forget_open_files
from ckptkit.io.torch_file import is_torch_file

from .files import others, read, same, tensors

CONTENT = {True: {**tensors(), **others()}, False: {**tensors(zipped=False), **others()}}
OFFSETS = st.floats(0, 1, exclude_max=True)


@cache
def file_of(zipped: bool) -> bytes:
    out = io.BytesIO()
    torch.save(CONTENT[zipped], out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage") / "a.pt"


def attempt(path: Path, data: bytes) -> object:
    """What is read, or the SourceError. Any other exception fails the test."""
    forget_open_files()
    path.write_bytes(data)
    is_torch_file(path)
    try:
        return read(path)
    except SourceError as error:
        assert error.why and error.hint, error.what
        return error


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@settings(max_examples=80)
@given(where=OFFSETS)
def test_a_truncated_file_is_an_error_wherever_it_is_cut(path: Path, zipped: bool, where: float) -> None:
    data = file_of(zipped)
    assert isinstance(attempt(path, data[: int(where * len(data))]), SourceError)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@settings(max_examples=150)
@given(flips=st.lists(st.tuples(OFFSETS, st.integers(0, 7)), min_size=1, max_size=3))
def test_flipped_bits_anywhere_are_an_error_or_are_read(
    path: Path, zipped: bool, flips: list[tuple[float, int]]
) -> None:
    data = bytearray(file_of(zipped))
    for where, bit in flips:
        data[int(where * len(data))] ^= 1 << bit
    attempt(path, bytes(data))


@settings(max_examples=150)
@given(where=OFFSETS, bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_pickle_is_found_by_the_checksum(path: Path, where: float, bit: int) -> None:
    data = bytearray(file_of(True))
    info = next(i for i in zipfile.ZipFile(io.BytesIO(data)).infolist() if i.filename.endswith("data.pkl"))
    start = data.index(b"\x80\x02", info.header_offset)
    data[start + int(where * info.file_size)] ^= 1 << bit
    assert isinstance(attempt(path, bytes(data)), SourceError)


def _structure(data: bytes) -> list[int]:
    """The positions of all bytes of a zip that are not data of a record."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    held: set[int] = set()
    for info in archive.infolist():
        name, extra = (int.from_bytes(data[info.header_offset + at :][:2], "little") for at in (26, 28))
        begin = info.header_offset + 30 + name + extra
        held |= set(range(begin, begin + info.file_size))
    return [position for position in range(len(data)) if position not in held]


@settings(max_examples=400)
@given(where=OFFSETS, bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_zip_structure_never_gives_a_wrong_value(path: Path, where: float, bit: int) -> None:
    """torch checks no lengths of local headers: one flipped bit there shifts every value of a tensor."""
    data = bytearray(file_of(True))
    positions = _structure_of_file()
    data[positions[int(where * len(positions))]] ^= 1 << bit
    found = attempt(path, bytes(data))
    assert isinstance(found, SourceError) or same(found, torch.load(io.BytesIO(file_of(True)), weights_only=False))


def test_no_bit_of_a_local_header_can_be_flipped_unseen(path: Path) -> None:
    """All of them, not a sample: a length that is four off looked like a shorter data descriptor."""
    intact = file_of(True)
    expected = torch.load(io.BytesIO(intact), weights_only=False)
    for info in zipfile.ZipFile(io.BytesIO(intact)).infolist():
        for at in (26, 27, 28, 29):  # the lengths of the name and of the extra field
            for bit in range(8):
                data = bytearray(intact)
                data[info.header_offset + at] ^= 1 << bit
                found = attempt(path, bytes(data))
                assert isinstance(found, SourceError) or same(found, expected), (info.filename, at, bit)


@cache
def _structure_of_file() -> list[int]:
    return _structure(file_of(True))


def test_the_undamaged_file_is_read(path: Path) -> None:
    for zipped in (True, False):
        found = attempt(path, file_of(zipped))
        assert same(found, torch.load(io.BytesIO(file_of(zipped)), weights_only=False))
