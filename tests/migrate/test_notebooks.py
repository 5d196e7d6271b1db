"""Notebooks: cells are one program, all bytes but the changed lines stay, and a migrated notebook trains as before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Runner
from test_pairs import assert_alike

from ckptkit import migrate
from ckptkit.errors import Exit
from ckptkit.migrate import json_text

BOOKS = sorted(path.parent for path in (SCRIPTS.parent / "notebooks").glob("*/before.ipynb"))
IDS = [book.name for book in BOOKS]
IMPORT = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"


def executed(book: Path, folder: Path) -> Path:
    """What running all cells does: files are written, shell lines do nothing, the code runs as one script."""
    # A launcher waits for its function to return, and `record` would end the process.
    code = [
        "import os, types, record",
        "record.os = types.SimpleNamespace(environ=os.environ, _exit=lambda code: None)",
    ]
    for cell in json.loads(book.read_text())["cells"]:
        source = "".join(cell["source"]) if cell["cell_type"] == "code" else ""
        head, _, rest = source.partition("\n")
        if head.startswith("%%writefile "):
            (folder / head.split()[1]).write_text(rest)
            continue
        source = rest if head.startswith("%%") else source
        source = re.sub(r"^[!%?](?:[^\n]*\\\n)*[^\n]*", "", source, flags=re.MULTILINE)
        code.append(re.sub(r"^(\w+ = )![^\n]*", r"\1[]", source, flags=re.MULTILINE))
    script = folder / "cells.py"
    script.write_text("\n".join(code))
    return script


@pytest.mark.parametrize("book", BOOKS, ids=IDS)
def test_before_becomes_after_and_stays_so(book: Path, tmp_path: Path) -> None:
    copy = tmp_path / "train.ipynb"
    copy.write_bytes((book / "before.ipynb").read_bytes())
    report = migrate.run([copy], write=True)
    assert not report.failed and not report.manual
    assert copy.read_bytes() == (book / "after.ipynb").read_bytes()
    assert not migrate.run([copy]).changed


@pytest.mark.parametrize("book", BOOKS, ids=IDS)
def test_nothing_but_code_cells_is_touched(book: Path) -> None:
    import nbformat

    before, after = (json.loads((book / f"{side}.ipynb").read_text()) for side in ("before", "after"))
    nbformat.validate(after)
    for old, new in zip(before["cells"], after["cells"], strict=True):
        if old["cell_type"] == "code":
            old.pop("source"), new.pop("source")
    assert before == after


@pytest.mark.slow
@pytest.mark.parametrize("book", BOOKS, ids=IDS)
def test_both_train_alike(book: Path, runner: Runner, tmp_path: Path) -> None:
    """One process runs the cells; the last one starts the ranks with accelerate's notebook_launcher."""
    pytest.importorskip("accelerate")
    records = []
    for side in ("before", "after"):
        (tmp_path / side).mkdir()
        script = executed(book / f"{side}.ipynb", tmp_path / side)
        records.append(runner.run(script, cwd=tmp_path / side, world=1, timeout=200))
    bound = 1e-6  # the norm is summed in another order: over flat shards there, parameter by parameter here
    assert_alike(*records, bound)
    # The control: without the clipping that the migrated cells do, the losses part.
    script.write_text(script.read_text().replace("parameters(), 0.1)", "parameters(), 1e9)"))
    with pytest.raises(AssertionError, match="differs by"):
        assert_alike(records[0], runner.run(script, cwd=script.parent, world=1, timeout=200), bound)


# -- layouts --------------------------------------------------------------------------------------------------------


def v4(*sources: Any, **metadata: Any) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": s} for s in sources
    ]
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


@pytest.fixture
def notebook(tmp_path: Path) -> Callable[..., tuple[str, migrate.Report]]:
    def run(text: str) -> tuple[str, migrate.Report]:
        path = tmp_path / "train.ipynb"
        path.write_bytes(text.encode())
        report = migrate.run([path], write=True)
        assert not [one for one in report.failed if one.bug], report.failed
        assert not migrate.run([path]).changed
        return path.read_bytes().decode(), report

    return run


LAYOUTS = {
    "nbformat's": lambda book: json.dumps(book, indent=1, ensure_ascii=False) + "\n",
    "no newline at the end": lambda book: json.dumps(book, indent=1),
    "tabs and CRLF": lambda book: json.dumps(book, indent="\t").replace("\n", "\r\n"),
    "one line": lambda book: json.dumps(book),
    "tight": lambda book: json.dumps(book, separators=(",", ":")) + "\n\n",
    "spaces before colons": lambda book: json.dumps(book, indent=3, separators=(" , ", " : ")),
    "other numbers": lambda book: json.dumps(book, indent=1).replace('"x": 1e-05', '"x": 1.00E-5'),
    "escaped slashes": lambda book: json.dumps(book, indent=1).replace("a/b", "a\\/b\\u00e9"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("as_list", [True, False])
def test_every_layout_of_json_is_kept(layout: Callable[..., str], as_list: bool, notebook: Callable) -> None:
    sources: list[Any] = [f"# a/b\n{IMPORT}\n", "x = 1", "def f(model):\n    model = FSDP(model)\n    return model"]
    sources = [source.splitlines(keepends=True) if as_list else source for source in sources]
    text = layout(v4(*sources, kernelspec={"name": "a/b", "x": 1e-05}))
    new, report = notebook(text)
    assert not report.manual
    assert new == text.replace("FullyShardedDataParallel as FSDP", "fully_shard").replace(
        "model = FSDP(model)", "fully_shard(model)"
    )
    assert new != text


def test_format_3_has_worksheets(notebook: Callable) -> None:
    cells = [
        {"cell_type": "code", "input": [f"{IMPORT}\n"], "language": "python", "outputs": [], "prompt_number": 1},
        {"cell_type": "code", "input": ["model = FSDP(model)"], "language": "python", "outputs": []},
    ]
    book = {"metadata": {"name": ""}, "nbformat": 3, "nbformat_minor": 0, "worksheets": [{"cells": cells}]}
    new, report = notebook(json.dumps(book, indent=1))
    inputs = ["".join(cell["input"]) for cell in json.loads(new)["worksheets"][0]["cells"]]
    assert inputs == ["from torch.distributed.fsdp import fully_shard\n", "fully_shard(model)"]
    assert [finding.cell for finding in report.findings] == [2]


def test_a_notebook_of_another_language_is_left(notebook: Callable) -> None:
    text = json.dumps(v4("using Flux; FSDP(x) # FullyShardedDataParallel ???", language_info={"name": "julia"}))
    new, report = notebook(text)
    assert new == text and not report.findings and not report.failed


MAGICS = """\

%load_ext autoreload
  %autoreload 2
!pip install torch \\
    --quiet
files = !ls
rate = %env RATE
!!nvidia-smi
?model
model?
model.forward??
for _ in range(2):
    !echo {_}
    %time 1
text = "%d-%d" % (
    1,
    2)
half = (7
        % 4)"""


@pytest.mark.parametrize("first", ["", "%%time\n", "%%capture out\n", "\n%%timeit -n 1\n"])
def test_magics_stay_and_the_code_around_them_is_migrated(first: str, notebook: Callable) -> None:
    text = json.dumps(v4(IMPORT, first + MAGICS + "\nmodel = FSDP(model)"), indent=1)
    new, report = notebook(text)
    assert not report.failed and not report.manual
    assert json.loads(new)["cells"][1]["source"] == first + MAGICS + "\nfully_shard(model)"


@pytest.mark.parametrize("magic", ["%%bash", "%%html", "%%javascript", "%%writefile run.sh", "%%latex"])
def test_cells_that_hold_no_python_are_left(magic: str, notebook: Callable) -> None:
    cell = f"{magic}\n{IMPORT}\nmodel = FSDP(model) <<< no python"
    text = json.dumps(v4(cell, IMPORT, "FSDP(model)"))
    assert json.loads(notebook(text)[0])["cells"][0]["source"] == cell


def test_a_file_that_a_cell_writes_is_a_module_of_the_program(notebook: Callable) -> None:
    """Its names are its own: the cells' FSDP is not the file's; the cells import from it."""
    book = v4(
        f"%%writefile /content/policies.py\n{IMPORT}\n\n\ndef shard(model):\n    return FSDP(model)\n",
        "from policies import shard\nmodel = shard(net)\nmodel.clip_grad_norm_(1.0)",
        "FSDP = 3\nprint(FSDP)",
    )
    new, report = notebook(json.dumps(book, indent=1))
    sources = [cell["source"] for cell in json.loads(new)["cells"]]
    assert sources[0].startswith("%%writefile /content/policies.py\n") and "return fully_shard(model)\n" in sources[0]
    assert (
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in sources[1]
        and sources[2] == book["cells"][2]["source"]
    )
    assert report.exit_code() == Exit.OK and {f.cell for f in report.findings} == {1, 2}


def test_launch_lines_in_cells_are_reported_where_they_stand(notebook: Callable) -> None:
    book = v4(
        "import os\n!deepspeed --num_gpus 2 train.py --deepspeed \\\n  --lr 1\nx = 1",
        "%%bash\nls\naccelerate launch --use_fsdp --fsdp_sharding_strategy 2 train.py",
        "!accelerate launch --use_fsdp --fsdp_version 2 train.py",
    )
    text = json.dumps(book)
    new, report = notebook(text)
    assert new == text
    assert [(one.cell, one.line, one.rule) for one in report.manual] == [(1, 2, "launch-lines"), (2, 2, "shell-flags")]
    assert "torchrun --nproc_per_node=2 train.py --lr 1" in report.manual[0].message
    assert "--fsdp_reshard_after_forward false" in report.manual[1].message


def test_json_spans_agree_with_json() -> None:
    text = ' {"a": [1, -2.5e3, "x\\u00e9\\n", {}, [], true, null], "b": {"c": ""}, "a": NaN} '
    tree = json_text.parse(text)
    assert str(tree.plain()) == str(json.loads(text))
    assert text[tree.start : tree.stop] == text.strip() and tree.get("b").plain() == {"c": ""}
    for broken in ("", "{", '{"a" 1}', "[1,]", "[1 2]", '{"a": 1,}', "1 2", "[" * 300 + "]" * 300, "tru"):
        with pytest.raises(ValueError):
            json_text.parse(broken)
