"""Values and imports that go in circles: the answers are complete, and their cost grows with the text, no faster."""

from __future__ import annotations

import time
from pathlib import Path

import libcst as cst

from ckptkit.migrate import engine
from ckptkit.migrate.fixpoint import Fixpoint
from ckptkit.migrate.flow import Flow
from ckptkit.migrate.module import Module
from ckptkit.migrate.origin import CALL, NAME, Origin
from ckptkit.migrate.program import Program
from ckptkit.migrate.text import decode


def _names(text: str, last: str) -> set[str]:
    """What the last use of a name may be, by the calls and names that it comes from."""
    module = Module(Path("x.py"), decode(text.encode()))
    flow = Flow(Program({module.path: module}))
    use = [node for node in module.every(cst.Name) if node.value == last][-1]
    return {origin.name for origin in flow.origins(module, use) if origin.kind in (CALL, NAME)}


def test_every_member_of_a_circle_has_all_that_enters_it() -> None:
    text = "import m\na, b, c = m.one(), m.two(), m.three()\n"
    text += "while m.go():\n    x = a\n    a = b\n    b = c\n    c = x\nprint(a, b, c)\n"
    for last in "abc":
        assert _names(text, last) == {"m.one", "m.two", "m.three"}


def test_items_of_items_in_a_loop_end() -> None:
    found = _names("import m\nx = m.f()\nfor i in range(3):\n    x = x[0]\nprint(x)\n", "x")
    assert {"m.f", "m.f[0]"} <= found and len(found) < 6


def test_many_names_that_depend_on_each_other_cost_no_more_than_their_text() -> None:
    names = [f"v{i}" for i in range(40)]
    lines = ["import m", *(f"{name} = m.{name}()" for name in names), "while m.go():"]
    lines += [f"    {a} = {b} if m.go() else {c}" for a in names for b, c in [(names[-1], a), (names[7], names[23])]]
    started = time.process_time()
    assert _names("\n".join([*lines, "print(v3)"]), "v3") >= {"m.v3", "m.v7", "m.v23", "m.v39"}
    assert time.process_time() - started < 5


def test_the_first_question_of_a_circle_asks_until_nothing_is_new() -> None:
    nodes = {key: Origin(None, cst.Name(key), NAME, key) for key in "abc"}  # type: ignore[arg-type]
    leads, memo, asked = {"a": "bc", "b": "a", "c": "b"}, Fixpoint(), []

    def ask(key: str) -> frozenset[Origin]:
        def work() -> frozenset[Origin]:
            asked.append(key)
            return frozenset({nodes[key]}).union(*(ask(other) for other in leads[key]))

        return memo.answer(key, work)

    assert {origin.name for origin in ask("c")} == set("abc")
    before = len(asked)
    assert all({origin.name for origin in ask(key)} == set("abc") for key in "abc") and len(asked) == before


def test_modules_that_import_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from two import wrap\n__all__ = ['wrap']\n")
    (tmp_path / "two.py").write_text("from one import wrap\n")
    (tmp_path / "train.py").write_text(
        "from one import wrap\nfrom torch.distributed.fsdp import FullyShardedDataParallel\n"
        "model = FullyShardedDataParallel(wrap(net))\n"
    )
    report = engine.run([str(tmp_path)])
    assert [one.path.name for one in report.changed] == ["train.py"] and not report.failed


def test_a_file_is_not_the_package_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text(
        "import deepspeed\nengine, *_ = deepspeed.initialize(model=net, config=config)\n"
    )
    assert [one.rule for one in engine.run([str(tmp_path)]).manual] != []


def test_a_folder_called_deepspeed_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text("import deepspeed as ds\nprint(ds.PipelineEngine)\n")
    assert [one.line for one in engine.run([str(tmp_path)]).manual] == [2]
