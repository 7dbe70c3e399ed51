"""What the model's parts know: immutable, hashable, as small as the rules allow.

Two engines (A attached with a worker on each shard, R remote), two shards, one or two control planes, a network of
messages in no order. A stopped process (SIGSTOP) needs no state of its own: it is one whose actions are not taken,
and the search takes every order. Time is what passes of a lease: ticks of half a time to live.
"""

from typing import NamedTuple

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
    boots: tuple[int, ...] = (1, 1)
    """Of the shards when they were mapped (A)."""


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
