"""Crafted pickles: every way we know to make a pickle run something or change what reads it. Each leaves `canary`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def call(module: str, name: str, *args: bytes) -> bytes:
    """`module.name(*args)` by GLOBAL and REDUCE."""
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(args) + b"tR"


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def made(canary: Path) -> str:
    return f"touch {canary}"


def python(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w')"


def dump(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


Make = Callable[[Path], bytes]

REFUSED: dict[str, Make] = {
    "os.system": lambda c: call("os", "system", text(made(c))),
    "posix.system": lambda c: call("posix", "system", text(made(c))),
    "os.system by STACK_GLOBAL": lambda c: stack_global("os", "system") + b"(" + text(made(c)) + b"tR",
    "builtins.eval": lambda c: call("builtins", "eval", text(python(c))),
    "__builtin__.eval": lambda c: call("__builtin__", "eval", text(python(c))),
    "builtins.exec": lambda c: call("builtins", "exec", text(python(c))),
    "builtins.open": lambda c: call("builtins", "open", text(str(c)), text("w")),
    "builtins.__import__": lambda c: call("builtins", "__import__", text("os")),
    "builtins dotted": lambda c: stack_global("builtins", "eval.__call__") + b"(" + text(python(c)) + b"tR",
    "builtins.map of eval": lambda c: call("builtins", "map", b"cbuiltins\neval\n", b"(" + text(python(c)) + b"t"),
    "subprocess.Popen": lambda c: call("subprocess", "Popen", b"(" + text("touch") + text(str(c)) + b"l"),
    "INST": lambda c: b"(" + text(made(c)) + b"ios\nsystem\n",
    "OBJ": lambda c: b"(cos\nsystem\n" + text(made(c)) + b"o",
    "runpy": lambda c: call("runpy", "_run_code", text(python(c)), b"}"),
    "importlib": lambda c: call("importlib", "import_module", text("antigravity")),
    "torch.load": lambda c: call("torch", "load", text(str(c))),
    "torch.hub.load": lambda c: call("torch.hub", "load", text(str(c))),
    "pickle.loads": lambda c: call("pickle", "loads", text(str(c))),
    "operator.attrgetter": lambda c: call("operator", "attrgetter", text("system")),
    "inside a stand-in's state": lambda c: b"cmy.mod\nConfig\n)\x81}" + text("x") + call(
        "os", "system", text(made(c))) + b"sb",
    "as a key": lambda c: b"}" + call("os", "system", text(made(c))) + b"K\x01s",
    "at protocol 0": lambda c: b"cos\nsystem\n(S'" + made(c).encode() + b"'\ntR",
}  # fmt: skip
"""They name what can only be there to run something."""

INERT: dict[str, Make] = {
    # Nothing of these is imported: they are objects that do nothing, errors of a damaged file, or plain data.
    "getattr on a stand-in": lambda c: call(
        "builtins", "getattr", b"cmy_os\nsystem\n", text("__init__")) + b"(" + text(made(c)) + b"tR",
    "getattr chain to eval": lambda c: call(
        "builtins", "getattr", call("builtins", "getattr", b"ccollections\nOrderedDict\n", text("__init__")),
        text("__globals__")),
    "getattr of globals of a function": lambda c: call(
        "builtins", "getattr", b"ctorch._utils\n_rebuild_tensor_v2\n", text("__globals__")),
    "an unknown module": lambda c: call("evil_module_on_no_machine", "run", text(made(c))),
    "fullwidth os": lambda c: stack_global("ｏｓ", "system") + b"(" + text(made(c)) + b"tR",
    "zero-width os": lambda c: stack_global("os\u200b", "system") + b"(" + text(made(c)) + b"tR",
    "a name with a null": lambda c: stack_global("my.mod", "a\x00b") + b"(" + text(made(c)) + b"tR",
    "a name with a surrogate": lambda c: stack_global("my.mod", "a\ud800") + b"(" + text(made(c)) + b"tR",
    "an empty name": lambda c: stack_global("", "") + b"(" + text(made(c)) + b"tR",
    "STACK_GLOBAL of numbers": lambda c: b"K\x01K\x02\x93",
    "dotted name of an allowed class": lambda c: stack_global(
        "collections", "OrderedDict.fromkeys") + b"(" + text(made(c)) + b"tR",
    "BUILD on an allowed function": lambda c: b"ctorch._utils\n_rebuild_tensor_v2\n}" + text(
        "_call") + b"cmy.mod\nX\nsb",
    "BUILD with slots on an allowed function": lambda c: b"ctorch._utils\n_rebuild_tensor_v2\nN}" + text(
        "_call") + b"cmy.mod\nX\ns\x86b",
    "BUILD on a class": lambda c: b"ccollections\nOrderedDict\n}" + text("__getitem__") + b"cmy.mod\nX\nsb",
    "BUILD with slots on a class": lambda c: b"ccollections\nOrderedDict\nN}" + text("x") + b"K\x01s\x86b",
    "BUILD on a stand-in class": lambda c: b"cmy.mod\nX\n}" + text("__new__") + b"cmy.mod\nY\nsb",
    "BUILD with slots on a stand-in class": lambda c: b"cmy.mod\nX\nN}" + text("__new__") + b"cmy.mod\nY\ns\x86b",
    "BUILD on a storage type": lambda c: b"ctorch\nFloatStorage\n](" + text("int64") + b"eb",
    "BUILD on a dtype": lambda c: b"ctorch\nfloat32\n}" + text("itemsize") + b"K\x01sb",
    "BUILD on a dict": lambda c: b"ccollections\nOrderedDict\n)R}" + text("items") + b"cmy.mod\nX\nsb",
    "BUILD with __setstate__": lambda c: b"cmy.mod\nX\n)\x81}" + text("__setstate__") + b"cmy.mod\nY\nsbN" + b"b",
    "BUILD with __class__": lambda c: b"cmy.mod\nX\n)\x81N}" + text("__class__") + b"ccollections\nOrderedDict\ns\x86b",
    "BUILD with __reduce__": lambda c: b"cmy.mod\nX\n)\x81}" + text("__reduce_ex__") + b"cmy.mod\nY\nsb",
    "EXT1": lambda c: b"\x82\x01",
    "EXT2": lambda c: b"\x83\x01\x01",
    "EXT4": lambda c: b"\x84\x01\x01\x01\x01",
    "copyreg": lambda c: call("copyreg", "add_extension", text("os"), text("system"), b"K\x01"),
    "copyreg._reconstructor": lambda c: call(
        "copyreg", "_reconstructor", b"cmy.mod\nX\n", b"cbuiltins\nobject\n", b"N"),
    "NEWOBJ of a number": lambda c: b"K\x01)\x81",
    "NEWOBJ_EX": lambda c: b"cmy.mod\nX\n)}\x92",
    "a reference to elsewhere": lambda c: text("x") + b"Q",
    "a reference of a wrong shape": lambda c: b"(" + text("storage") + b"tQ",
    "a reference of a wrong kind": lambda c: b"(" + text("module") + b"K\x01K\x02K\x03K\x04tQ",
    "a reference to a storage that is not there": lambda c: b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(
        "99") + text("cpu") + b"K\x04tQ",
    "a reference to a storage of a path": lambda c: b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(
        "../../etc/passwd") + text("cpu") + b"K\x04tQ",
    "a tensor of no storage": lambda c: call("torch._utils", "_rebuild_tensor_v2", b"}", b"K\x00", b")", b")"),
    "a tensor by a function of the file's choice": lambda c: call(
        "torch._tensor", "_rebuild_from_type_v2", b"cmy.mod\nX\n", b"cmy.mod\nX\n", b")", b"N"),
    "a memo of two billion": lambda c: b"Nr\xff\xff\xff\x7f0N",
    "a memo of two billion as text": lambda c: b"Np2000000000\n0N",
    "bytes of a length": lambda c: call("builtins", "bytes", b"\x8a\x05\x00\x00\x00\x00\x20"),
    "bytearray of a length": lambda c: call("builtins", "bytearray", b"\x8a\x05\x00\x00\x00\x00\x20"),
    "list of a range": lambda c: call("builtins", "list", call("builtins", "range", b"\x8a\x05\x00\x00\x00\x00\x20")),
    "a string of 2**40": lambda c: b"\x8d" + struct.pack("<Q", 1 << 40),
    "a frame of 2**60": lambda c: b"\x95" + struct.pack("<Q", 1 << 60),
    "ten thousand lists in one another": lambda c: b"]" * 10_000 + b"a" * 9_999,
    "a list in itself": lambda c: b"]q\x00h\x00a",
    "a dict in itself": lambda c: b"}q\x00" + text("x") + b"h\x00s",
    "a list that doubles sixty times": lambda c: b"]q\x00" + b"".join(
        b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60)),
    "an unhashable key": lambda c: b"}]K\x01s",
    "a stack that is empty": lambda c: b"0000",
    "an unknown opcode": lambda c: b"\xf0",
}  # fmt: skip
"""They name nothing that is refused by name, and must do nothing."""
