"""The engine keeps every byte that it need not touch, reads a directory as one program, and goes on after errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptkit import migrate
from ckptkit.errors import Exit, SourceError, UsageError
from ckptkit.migrate import Changed, Grade

SCRIPT = """\
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

model = nn.Linear(2, 2)   # two   blanks
model = FSDP(model)  # wrapped
"""


def one(path: Path, **options: object) -> str:
    [outcome] = migrate.run([path], **options).outcomes  # type: ignore[arg-type]
    assert isinstance(outcome, Changed), outcome
    return outcome.after


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_newlines_are_kept(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(SCRIPT.replace("\n", newline).encode())
    migrate.run([path], write=True)
    after = path.read_bytes().decode()
    assert after.count(newline) == after.replace(newline, "\n").count("\n") == 5
    assert "fully_shard(model)  # wrapped" in after


def test_tabs_are_kept_and_used(migrated: Callable) -> None:
    text = migrated(
        """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        def build(model, Block):
        \treturn FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        """
    ).text
    assert (
        "\tfor module in reversed(list(model.modules())[1:]):\n\t\tif isinstance(module, Block):\n\t\t\tfully" in text
    )


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + SCRIPT.encode(),
        b"# -*- coding: latin-1 -*-\n# caf\xe9\n" + SCRIPT.encode(),
        SCRIPT.rstrip("\n").encode(),
        SCRIPT.replace("two", "zwölf 🌟").encode(),
    ],
    ids=["bom", "coding cookie", "no newline at the end", "not ascii"],
)
def test_bytes_outside_the_edits_are_kept(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(data)
    migrate.run([path], write=True)
    expected = data.replace(b"import FullyShardedDataParallel as FSDP", b"import fully_shard")
    expected = expected.replace(b"model = FSDP(model)", b"fully_shard(model)")
    assert path.read_bytes() == expected


def test_a_syntax_error_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(SCRIPT)
    (tmp_path / "bad.py").write_text(SCRIPT + "def broken(:\n")
    report = migrate.run([tmp_path])
    assert [changed.path.name for changed in report.changed] == ["good.py"]
    assert [(failed.path.name, failed.line) for failed in report.failed] == [("bad.py", 6)]
    assert report.exit_code() == Exit.SOURCE


def test_files_that_do_not_mention_the_apis_are_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "nonsense.py").write_text("def broken(:\n")
    report = migrate.run([tmp_path])
    assert report.skipped == 1 and not report.failed


def test_skip_comments(untouched: Callable, migrated: Callable) -> None:
    untouched("# ckptkit: skip-file\n" + SCRIPT)
    untouched(SCRIPT.replace("# wrapped", "# ckptkit: skip"))
    untouched(SCRIPT.replace("model = FSDP(model)", "# ckptkit: skip\nmodel = FSDP(model)"))
    assert "fully_shard" in migrated(SCRIPT.replace("# wrapped", "# ckptkit: skipping is not skip")).text


def test_a_statement_that_shares_its_line(migrated: Callable) -> None:
    text = migrated(
        """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        def build(model, Block, log):
            log(1); model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy([Block])); log(2)
            if log: return FSDP(model.head, auto_wrap_policy=ModuleWrapPolicy([Block]))
            return model
        """
    ).text
    compile(text, "train.py", "exec")
    assert "    log(1)\n    for module in" in text and "    fully_shard(model)\n    log(2)\n" in text
    assert "    if log:\n        for module in" in text and "        return model.head\n" in text


def test_a_notebook_is_migrated_cell_by_cell_and_keeps_its_layout(tmp_path: Path) -> None:
    import nbformat

    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_markdown_cell("FSDP(model)"),
        nbformat.v4.new_code_cell("%matplotlib inline\n!pip list\nimport torch.nn as nn"),
        nbformat.v4.new_code_cell("%%bash\necho FSDP(model)"),
        nbformat.v4.new_code_cell("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"),
        nbformat.v4.new_code_cell("for _ in range(1):\n    %time 1\n    model = FSDP(nn.Linear(2, 2))"),
    ]
    path = tmp_path / "train.ipynb"
    nbformat.write(book, path)
    before = path.read_text()
    migrate.run([path], write=True)
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    assert cells[:3] == [cell.source for cell in book.cells[:3]]
    assert cells[3] == "from torch.distributed.fsdp import fully_shard"
    assert cells[4] == "for _ in range(1):\n    %time 1\n    model = fully_shard(nn.Linear(2, 2))"
    changed = [(a, b) for a, b in zip(before.splitlines(), path.read_text().splitlines(), strict=True) if a != b]
    assert len(changed) == 2
    assert not migrate.run([path]).changed


def test_a_directory_is_one_program(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from .policies import *\n")
    (tmp_path / "pkg" / "policies.py").write_text(
        "import functools\nimport torch\nfrom torch.distributed.fsdp import MixedPrecision\n"
        "from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\nfrom blocks import Block\n"
        "bf16 = MixedPrecision(param_dtype=torch.bfloat16)\n"
        "def wrap_policy():\n"
        "    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})\n"
    )
    (tmp_path / "blocks.py").write_text("import torch.nn as nn\nclass Block(nn.Module): pass\n")
    (tmp_path / "saving.py").write_text(
        "import torch\n\ndef save(model, rank):\n    state = model.state_dict()\n"
        "    if rank == 0:\n        torch.save(state, 'x.pt')\n"
    )
    (tmp_path / "train.py").write_text(
        "import pkg\nfrom saving import save\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "def main(model, rank):\n"
        "    model = FSDP(model, auto_wrap_policy=pkg.wrap_policy(), mixed_precision=pkg.bf16)\n"
        "    save(model, rank)\n"
    )
    report = migrate.run([tmp_path], write=True)
    assert not report.manual and not report.failed
    train = (tmp_path / "train.py").read_text()
    assert "from blocks import Block\n" in train and "isinstance(module, Block)" in train
    assert "param_dtype=torch.bfloat16, cast_forward_inputs=False" in train and "import torch\n" in train
    assert (
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        in (tmp_path / "saving.py").read_text()
    )


def test_every_leftover_is_reported_with_a_todo(migrated: Callable) -> None:
    found = migrated(
        """
        from torch.distributed.fsdp import FullyShardedDataParallel, FlatParameter
        class Mine(FullyShardedDataParallel):
            pass
        def is_flat(p):
            return isinstance(p, FlatParameter)
        registry = {"fsdp": FullyShardedDataParallel}
        """
    )
    assert found.grades == ["manual"] * 3
    assert found.text.count("# TODO(ckptkit): ") == 3
    assert found.report.exit_code() == Exit.FINDINGS


def test_options_are_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for options in ({"source": "fsdp3"}, {"target": "ddp"}, {"select": ("no-such-rule",)}, {"ignore": ("nor-this",)}):
        with pytest.raises(UsageError):
            migrate.run([tmp_path], **options)  # type: ignore[arg-type]
    with pytest.raises(SourceError):
        migrate.run([tmp_path / "missing.py"])


def test_check_and_json(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    report = migrate.run([tmp_path])
    assert report.exit_code() == Exit.OK and report.exit_code(check=True) == Exit.FINDINGS
    body = json.loads(json.dumps(report.as_json()))
    assert body["schema"] == 1 and body["files"][0]["outcome"] == "changed"
    assert body["findings"][0]["grade"] == Grade.EXACT.value and body["findings"][0]["line"] == 5


def test_the_engine_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, ckptkit.migrate as m; m.rules(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("rule", migrate.rules(), ids=lambda rule: rule.name)
def test_every_rule_has_a_whole_page(rule: migrate.Rule) -> None:
    for part in ("What:", "In numbers:", "Known limits:", "Before"):
        assert part in rule.page, f"{rule.name} says nothing about {part}"


def test_a_helper_takes_the_place_of_the_last_import(migrated: Callable) -> None:
    found = migrated(
        """
        import torch
        from net import build

        import deepspeed

        def main(config):
            model, optimizer, _, _ = deepspeed.initialize(model=build(), config={"train_micro_batch_size_per_gpu": 1})
        """
    )
    helpers = [name for name in ("local_device", "broadcast_buffers") if f"{name}(" in found.text]
    assert helpers and all(f"def {name}(" in found.text for name in helpers)


def test_an_import_for_others_stays(migrated: Callable) -> None:
    found = migrated(
        """
        from torch.nn.parallel import DistributedDataParallel as DDP
        from tools import is_parallel, other  # noqa: F401

        def inner(model):
            return model.module if is_parallel(model) else model

        def main(net):
            return inner(DDP(net))
        """
    )
    assert "from tools import is_parallel, other  # noqa: F401" in found.text
    assert "is_parallel(model)" not in found.text


def test_comments_in_a_policy_stay(migrated: Callable) -> None:
    found = migrated(
        """
        import torch
        from torch.distributed.fsdp import MixedPrecision

        half = MixedPrecision(
            param_dtype=torch.bfloat16,
            # what gradients travel in
            reduce_dtype=torch.float32,
        )
        """
    )
    assert "MixedPrecisionPolicy(" in found.text and "# what gradients travel in" in found.text
