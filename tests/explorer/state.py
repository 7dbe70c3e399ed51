"""What the model's parts know: immutable, hashable, as small as the rules allow.

Two engines (A attached with a worker on each shard, R remote), two shards, one or two control planes, a network of
messages in no order. A stopped process (SIGSTOP) needs no state of its own: it is one whose actions are not taken,
and the search takes every order. Time is what passes of a lease: ticks of half a time to live.
"""

from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

A, R = 0, 1
"""Engines: attached, remote."""
SHARDS = (0, 1)
NAMES = "AR"

IDLE, HELD, STAMPED, LIVE, DONE, FAILED = range(6)
"""How far a sequence's kernel is on one shard. Attached: hold bit set, stamp set, launched (it may write or read at any
moment until it is done). Remote: LIVE is a message that was not answered."""

RUNNING, COMMITTED, RELEASED = range(3)
"""Of a sequence: RELEASED covers finished, revoked, cut and lost; its reference is deferred until it has drained."""

INCARNATION = 10
"""A generation is incarnation × 10 + counter."""


class Row(NamedTuple):
    """A block's row in the directory."""

    generation: int = 0
    filled: bool = False
    digest: str = ""
    """Empty: not sealed."""


class Job(NamedTuple):
    """A remote kernel on the device."""

    plan: str
    block: int
    generation: int
    tag: str


class Shard(NamedTuple):
    """A compute service and its memory. `rows`, `stamps`, `data` run over blocks."""

    boot: int
    memory: int
    """Rises when the memory is lost; a process keeps the mapping that it has."""
    incarnation: int
    epoch: int
    version: int
    """Of the namespace."""
    rows: tuple[Row, ...]
    stamps: tuple[int, ...]
    data: tuple[str, ...]
    """What the bytes are, by the digest of the content."""
    bits: frozenset[int]
    """Hold map of A's worker."""
    sessions: frozenset[int]
    tables: frozenset[tuple[int, int]]
    """Granted to R: (block, generation)."""
    jobs: tuple[Job, ...]
    plans: frozenset[str]
    """Carried out already."""
    fenced: bool
    """R is."""


class Grant(NamedTuple):
    """What a grant names beside the block."""

    incarnation: int
    boots: tuple[int, ...]
    epoch: int


class Sequence(NamedTuple):
    """An engine's sequence of one block."""

    tag: str
    block: int
    generation: int
    hit: bool
    grant: Grant
    phases: tuple[int, ...] = (IDLE, IDLE)
    status: int = RUNNING


class Engine(NamedTuple):
    """An engine's processes: a worker per shard."""

    alive: tuple[bool, ...]
    age: int
    """Half times to live since the last renewal, at most 2."""
    start: int
    """Start of the control plane that it declared itself to: its stream's epoch."""
    mapped: tuple[int, ...]
    """Memory that each worker has mapped (A)."""
    sequences: tuple[Sequence, ...]
    inbox: tuple[tuple[int, str, Sequence | None], ...]
    """Answers on their way, in order: (start, kind, sequence)."""


class Block(NamedTuple):
    """A block as the control plane sees it. References are (engine, generation)."""

    generation: int = 0
    digest: str = ""
    """Indexed under it; empty: not."""
    held: frozenset[tuple[int, int]] = frozenset()
    deferred: frozenset[tuple[int, int]] = frozenset()


class Seal(NamedTuple):
    """A seal under way."""

    block: int
    generation: int
    digest: str
    acks: frozenset[int]


class Control(NamedTuple):
    """One start of the control plane."""

    start: int
    """Counts the starts: one process is never taken for another, whatever incarnation it took."""
    incarnation: int
    mode: str
    """starting, reconciling, ready, epoch (a new pool epoch is on its way to the shards)."""
    boots: tuple[int, ...]
    """Of the shards as registered; 0: not yet."""
    epoch: int
    version: int
    counter: int
    blocks: tuple[Block, ...]
    sessions: tuple[str, ...]
    """Per engine: none, open, silent (known from the shards, has not declared itself), fencing (its lease is over)."""
    timers: tuple[int, ...]
    """Half times to live since the last message of each engine, or since the start."""
    seals: frozenset[Seal]
    inventory: tuple[Shard | None, ...]
    """Directories as they were uploaded."""
    acks: frozenset[tuple[str, int]]
    """Shards that have acknowledged (what, shard)."""
    removing: int
    """Version that is being stored, 0: none."""
    waiting: str
    """Digest that R's waiting request was hashed to; empty: none."""


class Message(NamedTuple):
    """From a control plane or R to a shard, or an acknowledgement back (`kind` begins with ack)."""

    kind: str
    shard: int
    incarnation: int
    boot: int
    epoch: int = 0
    block: int = 0
    generation: int = 0
    tag: str = ""
    forged: bool = False


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
