"""Breaking lines that edits made too long: at the last bracket, one item a line, and never what the program had."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable

import pytest

from ckptkit.migrate.reflow import LIMIT, broken, reflow

LONG = "a_name_that_takes_thirty_columns_"
CASES = [
    f"load({LONG}, {LONG}, {LONG}, x={LONG})",
    f"state, other = get({LONG}, {LONG}), get({LONG}, options=Options(full={LONG}, {LONG[:9]}=1))",
    f"norm = clip({LONG}.parameters(), {LONG}, {LONG}, 'a, b (').full_tensor()  # a (comment, here)",
    f"units = [m for m in {LONG}.modules() if isinstance(m, {LONG}) and m is not {LONG} and m]",
    f"found = {{'model': get({LONG}, {LONG}), 'optim': get({LONG}, {LONG})}}",
    f"text = f'{{call({LONG}, 1)}} and (' + call({LONG}, {LONG}, key={LONG})",
    f"if call({LONG}) and call({LONG}, {LONG}, key=lambda a, b: a + {LONG[:20]}):\n    pass",
    f"rows = sorted(({LONG}, {LONG}), key=lambda one: (one, {LONG}, {LONG}))[0]",
]


@pytest.mark.parametrize("code", CASES)
@pytest.mark.parametrize("step", ["    ", "  ", "\t"])
def test_a_broken_line_fits_and_is_the_same_program(code: str, step: str) -> None:
    old = f"def main():\n{step}pass\n"
    new = f"def main():\n{textwrap.indent(code, step)}\n"
    text = reflow(old, new, new, step)
    assert text != new and ast.dump(ast.parse(text)) == ast.dump(ast.parse(new))
    assert all(len(line.split("  #")[0].expandtabs(4)) <= LIMIT for line in text.splitlines())
    assert reflow(old, text, text, step) == text
    assert all(line.startswith(step) for line in text.splitlines()[1:])


def test_contents_that_fit_stand_on_one_line_and_others_one_a_line() -> None:
    assert broken(f"set({LONG}, {LONG}, {LONG}, {LONG}).get()", "    ", 100) == [
        "set(",
        f"    {LONG},",
        f"    {LONG},",
        f"    {LONG},",
        f"    {LONG},",
        ").get()",
    ]
    assert broken(f"set({LONG}, {LONG}, {LONG})", "    ", 107) == ["set(", f"    {LONG}, {LONG}, {LONG}", ")"]


@pytest.mark.parametrize(
    "code",
    [
        f"x = 'a long text that has no bracket: {LONG * 4}'",
        f'"""A docstring ({LONG * 4}, {LONG}) of\nseveral lines."""',
        f"# a comment (of, {LONG * 4})",
        f"x = call({LONG}, {LONG}, {LONG}) + \\\n    1  # {LONG}",
    ],
)
def test_what_has_no_bracket_of_its_own_to_break_at_stays(code: str) -> None:
    assert reflow("", code + "\n", code + "\n", "    ") == code + "\n"


def test_a_line_of_the_program_stays_however_long() -> None:
    line = f"load({LONG}, {LONG}, {LONG}, {LONG})\n"
    assert reflow(line, line + "x = 1\n", line + "x = 1\n", "    ") == line + "x = 1\n"


def test_a_program_of_long_lines_gets_long_lines() -> None:
    old = "".join(f"call({n}, {LONG}, {LONG}, {LONG}, {LONG})\n" for n in range(3))
    assert len(old.splitlines()[0]) > LIMIT
    new = old + f"load({LONG}, {LONG}, {LONG}, {LONG})\n"
    assert reflow(old, new, new, "    ") == new


def test_windows_lines_stay_windows_lines() -> None:
    new = f"load({LONG}, {LONG}, {LONG}, {LONG})\r\n"
    assert "\n" not in reflow("", new, new, "    ").replace("\r\n", "")


def test_a_todo_takes_several_lines_once(migrated: Callable) -> None:
    found = migrated(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType\n"
        "model = FSDP(model)\nif True:\n"
        "    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):\n        state = model.state_dict()\n"
    )
    assert all(len(line) <= LIMIT for line in found.text.splitlines())
    assert found.text.count("TODO(ckptkit)") == 2 and "\n    #   " in found.text
