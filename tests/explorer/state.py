"""The state of the whole, what may still happen to it, and the bounds of a search."""

from typing import Any, NamedTuple, TypeVar

from explorer.parts import A, Block, Control, Engine, Message, R, Row, Shard

T = TypeVar("T")


class Budget(NamedTuple):
    """What may still happen."""

    prompts: tuple[tuple[str, ...], ...]
    starts: int = 0
    """New starts of the control plane."""
    crashes: int = 0
    """Crashes of control planes; without one the old start stays alive beside the new one."""
    losses: int = 0
    """Restarts of a shard that lose its memory."""
    reattaches: int = 0
    """Restarts of a shard that find its memory."""
    ticks: tuple[int, ...] = (0, 0)
    deaths: tuple[int, ...] = (0, 0)
    """Of A's and R's processes."""
    duplicates: int = 0
    rogue: int = 0
    """Messages that R makes up or sends in violation of the protocol."""
    evictions: int = 0
    removals: int = 0
    revocations: int = 0


class State(NamedTuple):
    """Everything."""

    shards: tuple[Shard, ...]
    controls: tuple[Control, ...]
    engines: tuple[Engine, ...]
    net: frozenset[Message]
    budget: Budget
    given: frozenset[tuple[int, int]] = frozenset()
    """(block, generation) handed out: to see one that is handed out twice."""
    removed: int = 0
    """Version below which content was removed, and the removal answered."""
    bad: str = ""
    """What went wrong."""


class Bounds(NamedTuple):
    """A scenario: how much may happen, and which operations there are."""

    name: str
    blocks: int
    budget: Budget
    operations: frozenset[str] = frozenset()
    """queue (R waits before it is admitted), reuse (a session may get its own deferred block); of a rogue R: forge,
    rewrite, lie (say that it has drained when it has not)."""
    opening: tuple[str, ...] = ()
    """Steps that are taken first."""
    still: tuple[str, ...] = ()
    """Steps that begin like this are not taken: a part that is stopped all the time."""


class Model(NamedTuple):
    """The rules that are in force, in a scenario."""

    rules: frozenset[str]
    bounds: Bounds

    def on(self, rule: str) -> bool:
        """Whether a rule is in force."""
        return rule in self.rules


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """`values` with one of them replaced."""
    return (*values[:index], value, *values[index + 1 :])


def with_shard(state: State, index: int, shard: Shard) -> State:
    """The state with another shard."""
    return state._replace(shards=put(state.shards, index, shard))


def with_control(state: State, index: int, control: Control) -> State:
    """The state with another control plane."""
    return state._replace(controls=put(state.controls, index, control))


def with_engine(state: State, index: int, engine: Engine) -> State:
    """The state with another engine."""
    return state._replace(engines=put(state.engines, index, engine))


def spend(state: State, **left: Any) -> State:
    """The state with some of the budget spent."""
    return state._replace(budget=state.budget._replace(**left))


def initial(bounds: Bounds) -> State:
    """A READY pool with both sessions open and nothing in it."""
    count = bounds.blocks
    shard = Shard(
        boot=1,
        memory=1,
        incarnation=1,
        epoch=1,
        version=0,
        rows=(Row(),) * count,
        stamps=(0,) * count,
        data=("",) * count,
        bits=frozenset(),
        sessions=frozenset((A, R)),
        tables=frozenset(),
        jobs=(),
        plans=frozenset(),
        fenced=False,
    )
    control = Control(
        start=1,
        incarnation=1,
        mode="ready",
        boots=(1, 1),
        epoch=1,
        version=0,
        counter=0,
        blocks=(Block(),) * count,
        sessions=("open", "open"),
        timers=(0, 0),
        seals=frozenset(),
        inventory=(None, None),
        acks=frozenset(),
        removing=0,
        waiting="",
    )
    engine = Engine((True, True), 0, 1, (1, 1), (), ())
    return State((shard, shard), (control,), (engine, engine), frozenset(), bounds.budget)
