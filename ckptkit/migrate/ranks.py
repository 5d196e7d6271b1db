"""Which lines run on one rank only: `if rank == 0:` and the other spellings of it."""

from __future__ import annotations

import re

import libcst as cst

from .draft import Draft

_RANK_WORDS = tuple(
    "rank==0 rank()==0 rank<1 notrank 0==rank is_main is_master master_process main_process is_rank_0 is_rank0 "
    "rank_zero rank0 is_primary is_chief is_global_zero".split()
)
_RANK_OF_NODE = re.compile(r"rank%[\w.()]+==0")
_RANK_BY_DEVICE = re.compile(
    r"(?:^|[.(]|and|or)(?:local_)?(?:gpu|gpu_id|gpu_idx|gpu_index|device_id|proc_id|process_id)==0(?!\d)"
)
_RANKS = re.compile(r"rank(?:\(\))?in[\[({](?:-1,0|0,-1|none,0)[\])}]")  # the one rank, or no process group at all
_TRUE_OF_OTHERS = ("rank", "RANK", "global_rank", "local_rank", "world_rank", "get_rank", "get_global_rank")
_IS_RANK = re.compile(r"\bget_(?:global_|local_)?rank\(|[\"'](?:LOCAL_)?RANK[\"']|^(?:self\.)?rank$")


def rank_guard(draft: Draft, node: cst.CSTNode) -> cst.If | None:
    """The outermost `if rank == 0:` (or `is_main_process` and the like) around a node within its function, or the `if`
    of the others (`rank != 0`) whose `else` it stands in.
    """
    found = None
    at: cst.CSTNode = node
    for holder in draft.module.ancestors(node):
        if isinstance(holder, (cst.FunctionDef, cst.Lambda)):
            break
        inside = isinstance(holder, cst.If) and at is holder.body and asks_rank(draft, holder.test)
        if isinstance(holder, cst.If) and (inside or (at is holder.orelse and asks_others(draft, holder.test))):
            found = holder
        at = holder
    return found


def asks_rank(draft: Draft, test: cst.BaseExpression) -> bool:
    """Whether a condition asks for one rank, by itself or by a name that is only ever given such a condition."""
    if is_rank_test(_of_ranks(draft, test)):
        return True
    if not isinstance(test, (cst.Name, cst.Attribute)):
        return False
    values = _values(draft, test)
    return bool(values) and all(is_rank_test(_of_ranks(draft, value)) for value in values)


def asks_others(draft: Draft, test: cst.BaseExpression) -> bool:
    """Whether a condition holds for all ranks but one: `not is_main()`, `rank != 0`, `rank > 0`, `rank`."""
    text = _of_ranks(draft, test)
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return asks_rank(draft, test.expression)
    if isinstance(test, cst.Comparison):
        return any(is_rank_test(text.replace(old, "== 0")) for old in ("!= 0", "> 0") if old in text)
    return text.removesuffix("()").rpartition(".")[2] in _TRUE_OF_OTHERS


def _of_ranks(draft: Draft, test: cst.BaseExpression) -> str:
    """The text of a condition; a number that is only ever given a rank (`r = dist.get_rank()`) is called so."""
    if isinstance(test, cst.Comparison) and isinstance(test.left, (cst.Name, cst.Attribute)):
        values = [draft.code(value) for value in _values(draft, test.left)]
        if values and all(_IS_RANK.search(value) for value in values):
            return draft.code(test).replace(draft.code(test.left), "local_rank" if "LOCAL" in values[0] else "rank", 1)
    return draft.code(test)


def _values(draft: Draft, name: cst.BaseExpression) -> list[cst.BaseExpression]:
    """All that a file assigns to a name or an attribute."""
    text, found = draft.code(name), []
    for one in draft.module.every(cst.Assign):
        for target in one.targets:
            pairs: list[tuple[cst.BaseExpression, cst.BaseExpression]] = [(target.target, one.value)]
            if isinstance(target.target, cst.Tuple) and isinstance(one.value, cst.Tuple):
                elements = zip(target.target.elements, one.value.elements, strict=False)
                pairs = [(left.value, right.value) for left, right in elements]
            found += [value for left, value in pairs if draft.code(left) == text]
    return found


def asks_each_node(text: str) -> bool:
    """Whether a rank test holds once on every node (`local_rank == 0`, `rank % gpus == 0`), not once in all."""
    squeezed = text.replace(" ", "").lower()
    return "local" in squeezed or any(test.search(squeezed) for test in (_RANK_OF_NODE, _RANK_BY_DEVICE))


def is_rank_test(text: str) -> bool:
    """Whether the text of a condition asks for one rank: `rank == 0`, `not rank`, `is_main_process()`,
    `dist.get_rank() < 1`.
    """
    squeezed = text.replace(" ", "").lower()
    if re.fullmatch(r"not[\w.()]+", squeezed) and " or " not in text and " and " not in text:
        return squeezed.removesuffix("()").endswith("rank")
    tests = (_RANK_OF_NODE, _RANK_BY_DEVICE, _RANKS)
    return any(word in squeezed for word in _RANK_WORDS) or any(test.search(squeezed) for test in tests)
