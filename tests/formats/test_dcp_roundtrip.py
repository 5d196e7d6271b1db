"""dcp: any tree that is laid out reads back equal, at any world size, and torch's own converter reads it too."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.core.checkpoint import Contents
from ckptkit.core.execute import execute
from ckptkit.core.flat_optimizer import flattened_optimizer, is_flat, nested_optimizer
from ckptkit.core.options import ReadOptions, WriteOptions
from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor
from ckptkit.core.tree import Tree, mapped
from ckptkit.errors import LossError
from ckptkit.formats import dcp
from ckptkit.io.move import dtype_name, move
from ckptkit.io.stage import staged
from ckptkit.opened import read_tensor

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn, torch.complex64]


def _tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    data = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    return data.to(torch.float32).to(dtype) if dtype.is_floating_point else data.to(dtype)


tensors = st.builds(_tensor, st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES), st.integers(0, 99))
plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=3)
)
# No dots in keys: DCP joins keys with them, and two trees would have one key.
keys = st.text("abcxyz_", min_size=1, max_size=4) | st.integers(10, 99)
trees = st.recursive(
    tensors | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=12,
)


def _ours(tree: Any) -> Tree:
    """The tree with core tensors in the place of torch's."""

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return Tensor.at(Constant(data), tuple(value.shape), dtype_name(value.dtype))

    return mapped(tree, leaf)


def _said(tree: Any) -> Any:
    """A tree as values that compare: tensors as dtype, shape and bytes, dicts without order."""
    if isinstance(tree, Tensor):
        tree = read_tensor(tree)
    if isinstance(tree, torch.Tensor):
        data = tree.contiguous().reshape(-1).view(torch.uint8).tolist() if tree.numel() else []
        return "tensor", str(tree.dtype), tuple(tree.shape), data
    if isinstance(tree, dict):
        return {key: _said(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_said(value) for value in tree)
    return type(tree).__name__, tree


def _write(tree: Tree, path: Path, **options: Any) -> None:
    with staged(path, is_file=False) as stage:
        layout = dcp.layout(Contents("dcp", tree, "a test"), WriteOptions("dcp", **options))
        execute(layout, stage.create, move, chunk=64)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.text("abcxyz_", min_size=1, max_size=4), trees, min_size=1, max_size=4), st.integers(1, 7))
def test_any_tree_reads_back_equal(tree: dict[str, Any], world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ckpt"
        _write(_ours(tree), path, world_size=world_size)
        assert _said(dcp.read(path, ReadOptions()).tree) == _said(tree)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), tensors | plain, min_size=1), st.integers(1, 5))
def test_torch_reads_what_is_written(tree: dict[str, Any], world_size: int) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _write(_ours({"top": tree}), Path(folder) / "ckpt", world_size=world_size)
        dcp_to_torch_save(Path(folder) / "ckpt", Path(folder) / "out.pt")
        assert _said(torch.load(Path(folder) / "out.pt", weights_only=False)) == _said({"top": tree})


def test_two_things_with_one_key_are_refused() -> None:
    tree = {"a": {"b": 1, 2: 3, "2": 4}, "a.b": 5}
    try:
        dcp.layout(Contents("dcp", tree, "a test"), WriteOptions("dcp"))
    except LossError as error:
        assert error.faults == ("a.2", "a.b")
    else:
        raise AssertionError("DCP would have lost one of two")


def test_facts_about_names_come_back() -> None:
    tree = _ours({"model": {"w": torch.ones(3), "v": torch.ones(3)}})
    facts = {"aliases": {"v": "w"}, "buffers": frozenset({"b"}), "frozen": frozenset()}
    with tempfile.TemporaryDirectory() as folder:
        with staged(Path(folder) / "ckpt", is_file=False) as stage:
            execute(dcp.layout(Contents("dcp", tree, "", facts=facts), WriteOptions("dcp")), stage.create, move)
        assert dcp.read(Path(folder) / "ckpt", ReadOptions()).facts == facts


names = st.lists(st.sampled_from(["w", "a.b", "a.b.c", "layers.0.w", "layers.10.w"]), unique=True, min_size=1)
hyper = st.fixed_dictionaries({"lr": st.sampled_from([0.1, 0.2]), "betas": st.sampled_from([(0.9, 0.99), (0.9, 0.95)])})


@settings(max_examples=100, deadline=None)
@given(names, st.lists(hyper, min_size=1, max_size=3, unique_by=lambda each: (each["lr"], each["betas"])), st.data())
def test_the_flat_optimizer_form_and_back(fqns: list[str], groups: list[dict[str, Any]], data: st.DataObject) -> None:
    where = [data.draw(st.integers(0, len(groups) - 1)) for _ in fqns]
    nested: dict[str, Any] = {
        "state": {name: {"step": index, "exp_avg": [index], "deep": {"x": 1}} for index, name in enumerate(fqns)},
        "param_groups": [
            {**group, "params": [name for name, at in zip(fqns, where, strict=True) if at == index]}
            for index, group in enumerate(groups)
        ],
    }
    nested["param_groups"] = [group for group in nested["param_groups"] if group["params"]]
    flat = flattened_optimizer(nested)
    assert is_flat(flat) and not is_flat(nested)
    assert nested_optimizer(flat) == nested
    assert nested_optimizer(nested) == nested


def test_torch_flattens_the_same() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    nested = get_optimizer_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert _said(flattened_optimizer(nested)) == _said(flat)
    assert _said(nested_optimizer(flat)) == _said(nested)
