"""What holds for every format and dialect, whichever there are: a newcomer is picked up from its folder."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptkit.cli.explain import pages

import ckptkit
from ckptkit.core.checkpoint import Contents, State
from ckptkit.core.place import Constant
from ckptkit.core.spec import Tensor
from ckptkit.dialects import Dialect, ForFolders, ForKeys, Writes, dialects
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.formats import Format, formats, targets, writers
from tests.cli.run import checkpoint, model

FORMATS, DIALECTS = formats(), dialects()
T = Tensor.at(Constant(b""), (2,), "float32")
NAMES = ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias"]
# Every pair that is written at all, with the options that its format needs.
PAIRS = [(to, dialect) for to in targets() for dialect in DIALECTS if isinstance(DIALECTS[dialect], Writes)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("generic") / "a.pt")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_keeps_its_contract(name: str, tmp_path: Path) -> None:
    module: Any = FORMATS[name]
    assert isinstance(module, Format) and name == module.NAME
    assert list(inspect.signature(module.detect).parameters) == ["path"]
    assert list(inspect.signature(module.read).parameters) == ["path", "options"]
    for function in ("layout", "drops", "warnings"):
        if hasattr(module, function):
            assert list(inspect.signature(getattr(module, function)).parameters) == ["contents", "options"]
    (tmp_path / "empty folder").mkdir()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "nothing").touch()
    for path in tmp_path.iterdir():
        assert module.detect(path) is None, path


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_keeps_its_contract(name: str, tmp_path: Path) -> None:
    module: Any = DIALECTS[name]
    assert isinstance(module, Dialect) and name == module.NAME
    assert isinstance(module, ForKeys | ForFolders), "it is found from keys or from file names"
    if isinstance(module, ForKeys):
        for tree in ({}, [], None, 3, {"x": 1}, {1: 2}, {"a": {}}, {"model": None}, {"app": 3}, {"state_dict": []}):
            assert not module.claims(Contents("full", tree, "")), tree
    if isinstance(module, ForFolders):
        assert module.find(tmp_path) is None
        (tmp_path / "readme").touch()
        assert module.find(tmp_path) is None


@pytest.mark.parametrize("name", [*FORMATS, *DIALECTS])
def test_it_has_a_page(name: str) -> None:
    module: Any = {**FORMATS, **DIALECTS}[name]
    stem = module.__name__.rpartition(".")[2].replace("_", "-")
    kind, page = pages()[stem]
    assert {"format", "dialect"} & set(kind.split(", ")) and page.startswith(f"{name}:") and len(page) > 80


def test_strategies_mean_targets_and_formats_that_exist() -> None:
    from ckptkit.conversion import STRATEGY_TARGETS
    from ckptkit.opening import STRATEGY_FORMATS

    assert set(STRATEGY_TARGETS.values()) <= set(targets())
    assert {name for names in STRATEGY_FORMATS.values() for name in names} <= set(FORMATS)
    assert {module.NAME for module in targets().values()} <= set(writers())


@pytest.mark.parametrize(("to", "dialect"), PAIRS)
def test_what_is_written_is_read_back_as_the_same(to: str, dialect: str, source: Path, tmp_path: Path) -> None:
    """Round trip through every format in every dialect: refused as a whole, or every tensor, group and extra again."""
    out = tmp_path / "out"
    options: dict[str, Any] = {"optimizer": True} if targets()[to].NAME == "safetensors" else {}
    try:
        report = ckptkit.convert(source, out, to=to, dialect=dialect, world_size=2, **options)
    except UsageError as error:
        assert error.hint and not out.exists()
        return
    assert report.written and report.checked == "full"
    back = ckptkit.open(out, dialect=dialect, model="tests.cli.run:model")
    assert (back.format, back.dialect) == (targets()[to].NAME, dialect)
    found = ckptkit.diff(source, back, model="tests.cli.run:model").differences
    assert [str(each) for each in found if each.kind != "only in b"] == []


@pytest.mark.parametrize(("to", "dialect"), PAIRS)
def test_two_conversions_give_the_same_bytes(to: str, dialect: str, source: Path, tmp_path: Path) -> None:
    trees = []
    for name, workers in (("one", 1), ("two", 3)):
        try:
            ckptkit.convert(source, tmp_path / name, to=to, dialect=dialect, workers=workers, allow_drop=True)
        except UsageError:
            pytest.skip(f"{dialect} is not written as {to}")
        root = tmp_path / name
        files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        trees.append({str(path.relative_to(root)): path.read_bytes() for path in files})
    assert trees[0] == trees[1]


@pytest.mark.parametrize("name", [name for name, each in DIALECTS.items() if isinstance(each, Writes)])
def test_a_dialect_writes_without_an_optimizer_and_with_unknown_extras(name: str) -> None:
    """`write` answers contents, or says that it does not write the format; it never loses the model."""
    module: Any = DIALECTS[name]
    written = 0
    for format in writers():
        try:
            parts = module.write(State({"w": T}, extras={"odd": {"a": 1}}), format)
        except UsageError as error:
            assert error.hint
            continue
        written += 1
        assert all(isinstance(each, Contents) and each.format in FORMATS for each in parts.values())
        held = {id(leaf) for each in parts.values() for leaf in _leaves(each.tree)}
        assert id(T) in held
    assert written


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for child in tree.values() for leaf in _leaves(child)]
    return [tree]


def test_the_model_that_the_tests_know(source: Path) -> None:
    opened = ckptkit.open(source)
    assert [name for group in opened.param_groups for name in group["params"]] == NAMES
    for name, tensor in model().state_dict().items():
        assert opened.read(name).shape == tensor.shape and opened.read(name).dtype == tensor.dtype
    assert not torch.equal(opened.read("0.weight"), model().state_dict()["0.weight"]), "it was trained"
    with pytest.raises(KeyError, match="only exp_avg, exp_avg_sq, step, value"):
        opened.read("0.weight", "momentum_buffer")
    assert issubclass(UsageError, CkptkitError)
