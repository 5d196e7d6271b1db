"""The README is kept true: its examples run, its tables name what there is, its numbers are within the tests' bound."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit.dialects import dialects
from ckptkit.errors import Exit
from ckptkit.formats import formats

from .resume.matrix import SOURCES, TARGETS
from .resume.test_matrix import BOUND

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RUN = {"fsdp1.pt": "fsdp1-full", "ddp.pt": "ddp-full", "zero2": "zero2", "fsdp2": "fsdp2-dcp"}


@pytest.mark.slow
def test_examples_run(fixture_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Every `$ ckptkit ...` line, in order, in one folder; `# exit N` after a command says what it ends with."""
    from .truth import truth_of

    (tmp_path / "run").mkdir()
    for name, fixture in RUN.items():
        (tmp_path / "run" / name).symlink_to(truth_of(fixture_dir(fixture)).path)
    (tmp_path / "train.py").write_text("from ckptkit.verify.default_model import default_model as make_model\n")
    shutil.copy(ROOT / "fixtures/demo/train.py", tmp_path / "train_fsdp1.py")
    commands = re.findall(r"^\$ ckptkit (.+)$", "\n".join(re.findall(r"```console\n(.*?)```", README, re.S)), re.M)
    assert len(commands) >= 15
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    for line in commands:
        command, _, note = line.partition(" # ")
        expected = int(note.removeprefix("exit ").partition(":")[0]) if note.startswith("exit ") else 0
        done = subprocess.run(
            [sys.executable, "-m", "ckptkit", *command.split()],
            cwd=tmp_path, capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == expected, f"{line}\n{done.stdout}\n{done.stderr}"
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr


def test_tables_name_what_there_is() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)` \|", README, re.M))
    parts = {name for name, module in formats().items() if getattr(module, "PART_ONLY", False)}
    assert rows == (set(formats()) - parts) | set(dialects())


def test_exit_codes_are_those_of_the_code() -> None:
    assert set(re.findall(r"^\| (\d+) \|", README, re.M)) == {str(int(code)) for code in Exit}


def test_the_resume_matrix_is_whole_and_within_its_bound() -> None:
    table = README.split("<!-- resume-matrix -->")[1].split("<!-- /resume-matrix -->")[0].strip().splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")][1:] == list(TARGETS)
    rows = {row.strip("|").split("|")[0].strip(): row.strip("|").split("|")[1:] for row in table[2:]}
    assert list(rows) == list(SOURCES)
    assert all(float(cell) <= BOUND for cells in rows.values() for cell in cells)


def test_the_ci_example_is_the_one_that_is_tested() -> None:
    shown = README.split("<!-- ci-example -->")[1].split("<!-- /ci-example -->")[0]
    assert shown.strip() == f"```yaml\n{(ROOT / 'fixtures/ci/verify.yml').read_text()}```"
