"""Integer optimizer ids to names: the one assignment that fits order and shapes, or an error naming two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import AmbiguousError, SourceError
from .box import Shape

_SEARCH_LIMIT = 200_000
_HINT = (
    "say which with --param-names FILE (one name a line, in the order of model.parameters()) or --model pkg.mod:factory"
)


def match_ids(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], names: Mapping[str, Shape]
) -> dict[int, str]:
    """Assign every id of every group to a name.

    torch numbers parameters through all groups in order, and within a group they stand in the order in which the
    model yields them (torch/optim/optimizer.py `state_dict`, 2.13). So each group's ids are an increasing sequence in
    `names` (the candidates in the model's order), and an id whose state has a shape goes to a name of that shape;
    `shapes` holds the ids for which one is known. A candidate may be left out: it is frozen, or a buffer.

    Raises SourceError where no assignment fits, AmbiguousError where two do and cannot be told apart.
    """
    order = list(names)
    total = sum(len(group) for group in groups)
    if total > len(order):
        raise SourceError(
            f"the optimizer has {total} parameters and the model only {len(order)} that can be",
            why="the two are not of one model", hint=_HINT,
        )  # fmt: skip
    search = _Search([list(group) for group in groups], shapes, names, order)
    found = search.solutions()
    if not found:
        raise SourceError(
            "the optimizer's ids do not fit the model's names",
            why="no assignment in the order of the model gives every id a name of its shape", hint=_HINT,
        )  # fmt: skip
    if len(found) > 1:
        first, second = found[:2]
        where = next(key for key in first if first[key] != second[key])
        raise AmbiguousError(
            f"optimizer id {where} may be {first[where]!r} or {second[where]!r}",
            why="both fit the order and every shape; a wrong guess would swap optimizer states silently", hint=_HINT,
        )  # fmt: skip
    return found[0]


def shape_of_state(slots: Mapping[str, Shape]) -> Shape | None:
    """The shape of the parameter that has optimizer states of these shapes; None where they do not say.

    Most states have their parameter's shape. Adafactor factors a matrix: torch's row and column broadcast to it
    (torch/optim/_adafactor.py, 2.13), transformers' have it without the last and without the last but one dimension
    (transformers/optimization.py). LBFGS keeps vectors over all parameters with the first one (torch/optim/lbfgs.py).
    """
    if "prev_flat_grad" in slots:
        return None
    row, column = slots.get("exp_avg_sq_row"), slots.get("exp_avg_sq_col")
    if row is not None and column is not None:
        return (*row, column[-1])
    row, column = slots.get("row_var"), slots.get("col_var")
    if row is not None and column is not None:
        return (*row[:-1], column[-1])
    return next((shape for slot, shape in slots.items() if slot != "step" and shape), None)


def named_ids(groups: Sequence[Sequence[int]], parameters: Sequence[str]) -> dict[int, str]:
    """The assignment where the parameters are given: by position where counts agree in one group's order.

    `parameters` are those that the optimizer got, in the order of the ids. Raises SourceError on another count.
    """
    ids = [key for group in groups for key in group]
    if len(ids) != len(parameters):
        raise SourceError(
            f"{len(parameters)} parameter names were given for {len(ids)} optimizer ids",
            why="every id needs its name",
            hint="give one name for each parameter that the optimizer holds, group after group",
        )
    return dict(zip(ids, parameters, strict=True))


_At = tuple[int, tuple[int, ...]]  # which name comes next, and how many ids of each group are assigned
_Choice = tuple[int, str] | None  # the id that took the name, or None: the name was left out


class _Search:
    """Depth-first over the names; a position that led to no assignment is never entered again."""

    def __init__(
        self, groups: list[list[int]], shapes: Mapping[int, Shape], names: Mapping[str, Shape], order: list[str]
    ) -> None:
        self._groups, self._shapes, self._names, self._order = groups, shapes, names, order
        self._total = sum(len(group) for group in groups)
        self._dead: set[_At] = set()
        self._visited = 0

    def solutions(self) -> list[dict[int, str]]:
        """At most two assignments."""
        found: list[dict[int, str]] = []
        start: _At = (0, (0,) * len(self._groups))
        chosen: list[_Choice] = []
        stack = [(start, self._moves(start), 0)]
        while stack:
            at, moves, before = stack[-1]
            if sum(at[1]) == self._total:
                found.append(dict(pair for pair in chosen if pair))
                if len(found) == 2:
                    return found
                moves.clear()
            if moves:
                target, choice = moves.pop(0)
                if target not in self._dead:
                    stack.append((target, self._moves(target), len(found)))
                    chosen.append(choice)
                continue
            stack.pop()
            if before == len(found):
                self._dead.add(at)
            if chosen:
                chosen.pop()
        return found

    def _moves(self, at: _At) -> list[tuple[_At, _Choice]]:
        self._visited += 1
        if self._visited > _SEARCH_LIMIT:
            raise AmbiguousError(
                "the optimizer's ids could not be assigned to names",
                why="too many assignments fit the order and the shapes",
                hint=_HINT,
            )
        index, fill = at
        missing, names_left = self._total - sum(fill), len(self._order) - index
        if not names_left or missing > names_left:
            return []
        name = self._order[index]
        moves: list[tuple[_At, _Choice]] = []
        for which, group in enumerate(self._groups):
            if fill[which] == len(group):
                continue
            key = group[fill[which]]
            if self._shapes.get(key, self._names[name]) == self._names[name]:
                moves.append(((index + 1, (*fill[:which], fill[which] + 1, *fill[which + 1 :])), (key, name)))
        if missing < names_left:
            moves.append(((index + 1, fill), None))
        return moves
