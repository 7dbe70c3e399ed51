"""Breadth first, so that the first trace to a violation is a shortest one."""

from collections.abc import Iterable
from typing import NamedTuple

from explorer import control, engines, shard
from explorer.properties import violation
from explorer.state import Bounds, Model, State, initial


class Result(NamedTuple):
    """What a search came to."""

    states: int
    complete: bool
    """False: the cap on states was reached."""
    violation: str
    """Empty: none."""
    trace: tuple[str, ...]
    """The steps to it."""


def successors(m: Model, state: State) -> Iterable[tuple[str, State]]:
    """All steps of all parts."""
    for part in (shard, engines, control):
        for label, after in part.steps(m, state):
            if not label.startswith(m.bounds.still):
                yield label, after


def opened(m: Model) -> State:
    """The state after the opening. Raises `ValueError` for a step that cannot be taken."""
    state = initial(m.bounds)
    free = m._replace(bounds=m.bounds._replace(still=()))
    for wanted in m.bounds.opening:
        for label, after in successors(free, state):
            if label == wanted:
                state = after
                break
        else:
            possible = ", ".join(label for label, _ in successors(free, state))
            raise ValueError(f"{m.bounds.name}: {wanted!r} is none of {possible}")
    return state


def search(rules: Iterable[str], bounds: Bounds, cap: int = 1_000_000) -> Result:
    """All states that can be reached under the rules, up to the first violation."""
    m = Model(frozenset(rules), bounds)
    start = opened(m)
    parents: dict[State, tuple[State, str] | None] = {start: None}
    frontier = [start]
    while frontier:
        following: list[State] = []
        for state in frontier:
            for label, after in successors(m, state):
                if after in parents:
                    continue
                parents[after] = (state, label)
                wrong = violation(m, after)
                if wrong:
                    return Result(len(parents), True, wrong, bounds.opening + _trace(parents, after))
                if len(parents) >= cap:
                    return Result(len(parents), False, "", ())
                following.append(after)
        frontier = following
    return Result(len(parents), True, "", ())


def _trace(parents: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    labels = []
    while (step := parents[state]) is not None:
        state, label = step
        labels.append(label)
    return tuple(reversed(labels))
