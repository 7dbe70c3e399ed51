"""Breadth first, so that the first trace to a violation is a shortest one."""

import gc
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

from explorer import control, engines, shard
from explorer.properties import violation
from explorer.state import Bounds, Model, State, initial, with_engine

FAULTS = 0.1
"""Share of faults among the steps of a random walk."""


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
                yield label, settled(m, after)


def settled(m: Model, state: State) -> State:
    """The state without what nobody will ever act on: it would only multiply the states."""
    if state.net:
        starts = {each.incarnation for each in state.controls}
        dead = [
            message
            for message in state.net
            if message.kind != "run"
            and (
                message.incarnation not in starts
                if message.kind.startswith("ack")
                else (
                    (m.on("incarnation on messages") and message.incarnation < state.shards[message.shard].incarnation)
                    or (m.on("boot id on messages") and message.boot != state.shards[message.shard].boot)
                )
            )
        ]
        if dead:
            state = state._replace(net=state.net.difference(dead))
    if m.on("stream epoch"):
        for index, engine in enumerate(state.engines):
            if engine.inbox and engine.inbox[0][0] < engine.start:
                inbox = tuple(each for each in engine.inbox if each[0] >= engine.start)
                state = with_engine(state, index, engine._replace(inbox=inbox))
    return state


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
    # Millions of small tuples and no cycles: looking for some costs more than the search.
    gc.disable()
    try:
        return _search(Model(frozenset(rules), bounds), cap)
    finally:
        gc.enable()


def _search(m: Model, cap: int) -> Result:
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
                    return Result(len(parents), True, wrong, m.bounds.opening + _trace(parents, after))
                if len(parents) >= cap:
                    return Result(len(parents), False, "", ())
                following.append(after)
        frontier = following
    return Result(len(parents), True, "", ())


def walk(rules: Iterable[str], bounds: Bounds, seed: int, walks: int, longest: int = 200) -> Result:
    """Random walks: deeper than a search comes, without its promise."""
    m = Model(frozenset(rules), bounds)
    random = Random(seed)
    seen = 0
    for _ in range(walks):
        state, labels = opened(m), list(bounds.opening)
        for _ in range(longest):
            choices = list(successors(m, state))
            if not choices:
                break
            # Faults are rare, or little happens between them.
            faults = [each for each in choices if _is_fault(state, each[1])]
            calm = [each for each in choices if not _is_fault(state, each[1])]
            label, state = random.choice(faults if faults and (not calm or random.random() < FAULTS) else calm)
            labels.append(label)
            seen += 1
            wrong = violation(m, state)
            if wrong:
                return Result(seen, False, wrong, tuple(labels))
    return Result(seen, False, "", ())


def _is_fault(before: State, after: State) -> bool:
    return before.budget is not after.budget and before.budget.prompts == after.budget.prompts


def _trace(parents: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    labels = []
    while (step := parents[state]) is not None:
        state, label = step
        labels.append(label)
    return tuple(reversed(labels))
