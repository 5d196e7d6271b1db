"""Answers to questions that depend on one another in circles: each question is worked out once, a circle until it is
stable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from .origin import NOTHING, Origins

_NEVER = 1 << 60
ROUNDS = 8  # no circle that was seen needs more than three; a bound, for not every step is monotone


@dataclass(slots=True)
class Fixpoint:
    """A memo of sets that are unions of each other, by depth-first search (the circles are Tarjan's components).

    A question that is asked again while it is being worked out has the answer of the round before (at first none).
    The first question of a circle is worked out until its answer stays; only then are the answers within it known.
    Without this every way through a circle would be gone again from each of its members: exponentially many.
    """

    _known: dict[Hashable, Origins] = field(default_factory=dict)
    _depth: dict[Hashable, int] = field(default_factory=dict)  # questions at work, by how many were at work before
    _lowest: list[int] = field(default_factory=list)  # for each question at work: the outermost one it has asked for
    _before: dict[Hashable, Origins] = field(default_factory=dict)  # answers of the last round
    _open: dict[Hashable, tuple[Origins, int]] = field(
        default_factory=dict
    )  # answers of this round in a circle, with the
    # outermost question that they depend on

    def answer(self, key: Hashable, work: Callable[[], Origins]) -> Origins:
        """The answer of `work`, which may ask for further answers, itself included."""
        if key in self._known:
            return self._known[key]
        if key in self._depth:
            self._lean(self._depth[key])
            return self._before.get(key, NOTHING)
        if key in self._open:
            found, lowest = self._open[key]
            self._lean(lowest)
            return found
        depth, opened = len(self._lowest), len(self._open)
        self._depth[key] = depth
        found, lowest = NOTHING, _NEVER
        try:
            for _ in range(ROUNDS):
                self._lowest.append(_NEVER)
                try:
                    found = work()
                finally:
                    lowest = self._lowest.pop()
                stable = self._before.get(key, NOTHING) == found
                self._before[key] = found
                if lowest != depth or stable:
                    break
                self._before.update(self._close(opened))
        except BaseException:
            self._close(opened)
            raise
        finally:
            del self._depth[key]
        if lowest < depth:
            self._lean(lowest)
            self._open[key] = (found, lowest)
            return found
        self._known.update(self._close(opened))
        self._known[key] = found
        for done in self._before.keys() & self._known.keys() if not self._depth else ():
            del self._before[done]
        return found

    def _close(self, opened: int) -> dict[Hashable, Origins]:
        """Take out the answers of circles that were opened after the first `opened`."""
        closed: dict[Hashable, Origins] = {}
        while len(self._open) > opened:
            key, (found, _) = self._open.popitem()
            closed[key] = found
        return closed

    def settled(self, work: Callable[[], None]) -> bool:
        """Do some work; whether none of the answers that it asked for may still grow."""
        self._lowest.append(_NEVER)
        try:
            work()
        finally:
            lowest = self._lowest.pop()
        self._lean(lowest)
        return lowest == _NEVER

    def _lean(self, depth: int) -> None:
        if self._lowest and depth < self._lowest[-1]:
            self._lowest[-1] = depth
