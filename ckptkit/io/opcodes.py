"""A look at a pickle's opcodes before it is read: where it ends, and that it is no bomb.

The C unpickler keeps its memo as an array: five bytes that name the memo's entry two billion make it ask for sixteen
gigabytes. Every pickler counts the memo up, so an entry's number is never greater than its position in the stream.
"""

from __future__ import annotations

import pickletools
from typing import BinaryIO

_LINE, _TWO_LINES, _UNKNOWN, _REFUSED = -6, -7, -8, -9
_LENGTHS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4,
            pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # fmt: skip
_STOP, _LONG_BINPUT, _PUT = b"."[0], b"r"[0], b"p"[0]
_BLOCK = 1 << 20


def _sizes() -> list[int]:
    """Per opcode: how many bytes of argument follow, or which kind of argument."""
    sizes = [_UNKNOWN] * 256
    for opcode in pickletools.opcodes:
        kind = 0 if opcode.arg is None else opcode.arg.n
        if kind == pickletools.UP_TO_NEWLINE:
            kind = _TWO_LINES if opcode.name in ("GLOBAL", "INST") else _LINE
        # The extension registry belongs to the program that reads, and its cache is asked before the allow-list.
        sizes[ord(opcode.code)] = _REFUSED if opcode.name.startswith("EXT") else kind
    return sizes


_SIZES = _sizes()


def end_of(data: bytes) -> int:
    """Where the first pickle in `data` ends. Raises EOFError where it does not, ValueError for a bomb or no pickle."""
    at, size = 0, len(data)
    while at < size:
        opcode = data[at]
        argument = _SIZES[opcode]
        at += 1
        if argument >= 0:
            if opcode == _LONG_BINPUT and int.from_bytes(data[at : at + 4], "little") > at:
                raise ValueError("it asks for a memo of more entries than it has bytes")
            if opcode == _STOP:
                return at
            at += argument
        elif argument in _LENGTHS:
            width = _LENGTHS[argument]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif argument in (_LINE, _TWO_LINES):
            end = data.find(b"\n", at)
            if opcode == _PUT and end > 0 and int(data[at:end]) > at:
                raise ValueError("it asks for a memo of more entries than it has bytes")
            if argument == _TWO_LINES and end >= 0:
                end = data.find(b"\n", end + 1)
            at = end + 1 if end >= 0 else size
        elif argument == _REFUSED:
            raise ValueError("it uses the extension registry, which no checkpoint does")
        else:
            raise ValueError(f"it has no opcode {bytes([opcode])!r}")
    raise EOFError("the pickle does not end")


def one_pickle(file: BinaryIO) -> bytes:
    """The bytes of the pickle that begins where the file stands; it stands behind it then. Raises as `end_of`."""
    start, data, block = file.tell(), b"", _BLOCK
    while True:
        more = file.read(block)
        data += more
        try:
            end = end_of(data)
            break
        except EOFError:
            if not more:
                raise
        block = len(data)
    file.seek(start + end)
    return data[:end]
