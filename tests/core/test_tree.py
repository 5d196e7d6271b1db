"""Trees: leaves with their paths, and what counts as a model's state dict."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor
from ckptkit.core.tree import Opaque, dotted, is_tensors, mapped, outline, walk

Point = namedtuple("Point", "x y")
T = Tensor.at(Constant(b""), (), "float32")


def test_walk_gives_every_leaf_in_order_and_empty_containers() -> None:
    tree = {"a": [1, {"b": 2}], "empty": {}, "none": [], "t": (3,), "p": Point(1, 2)}
    assert list(walk(tree)) == [
        (("a", 0), 1), (("a", 1, "b"), 2), (("empty",), {}), (("none",), []), (("t", 0), 3), (("p",), Point(1, 2)),
    ]  # fmt: skip
    assert dotted(("a", 1, "b")) == "a.1.b"


def test_mapped_keeps_the_containers() -> None:
    tree = OrderedDict(a=[1, (2, 3)], b={})
    assert mapped(tree, lambda path, value: value * 10) == {"a": [10, (20, 30)], "b": {}}


def test_a_state_dict_is_a_flat_dict_of_tensors() -> None:
    assert is_tensors({"w": T, "m._extra_state": {"any": 1}}) and is_tensors({"w": T, "q": Opaque("x.Q")})
    for tree in ({}, {"w": 1}, {"w": T, "n": 3}, {"w": {"x": T}}, {0: T}, [T], T, {"q": Opaque("x.Q")},
                 {"a._extra_state": T}):  # fmt: skip
        assert not is_tensors(tree)


def test_outline_is_short() -> None:
    assert outline({"a": 1, "b": {"x": T, "y": T}}) == "a (an int), b (a dict of x, y)" and outline([1]) == "a list"
    assert outline({}) == "no keys" and outline({"m": Opaque("my.Net")}) == "m (an object of class my.Net)"
    assert outline(dict.fromkeys(map(str, range(30)), 1)).endswith("... (30 keys)")
