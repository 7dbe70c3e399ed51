"""Sequences: numbers that every step reads as columns by row, everything else as a record.

`sequence_id = serial ‖ row`: a session's rows lie at a base of its own, so the row of the columns is
`base + (sequence_id & 0xffffffff)`, and a finished or foreign sequence is one comparison away.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from kvplane.cache.core.arrays import I64, NO_I64, U8, U32, U64
from kvplane.cache.core.chains import Chain
from kvplane.cache.core.extents import Extents
from kvplane.cache.core.results import Reason
from kvplane.wire.digests import ExtraKey
from kvplane.wire.identity import DIGEST_BYTES

ROW_MASK = 0xFFFF_FFFF
NEVER = 1 << 62
"""A number of tokens, or of a step, that is never reached."""


class Status(IntEnum):
    """State of a row."""

    FREE = 0
    WAITING = 1
    PREEMPTED = 2
    RUNNING = 3


@dataclass(slots=True)
class Sequence:
    """What a step seldom needs of a sequence."""

    sequence_id: int
    session_id: int
    row: int
    namespace_id: int
    read_cache: bool
    write_cache: bool
    max_hit_tokens: int | None
    extra_keys: Mapping[int, tuple[ExtraKey, ...]]
    priority: int
    arrival: int
    ranked: bool
    """The client gave `arrival`; otherwise it counts first namings."""
    chain: Chain
    tokens: bytes = b""
    """Known tokens, packed u32, while not running."""
    frontier: int | None = None
    """Index of the first prompt block that this sequence writes and nobody can hit yet."""
    progress_seconds: float = 0.0
    """When this sequence last committed prompt blocks."""
    refused_at: int | None = None
    """Admissions of the pool so far when this sequence was first refused for want of space."""
    asked_tick: int = -1
    """Step of the pool in which its admission was last asked for."""
    waiting_reason: Reason = Reason.NONE
    copies: set[int] = field(default_factory=set)
    """Copies into this sequence's blocks that are not acknowledged."""


class SequenceRows:
    """Columns by row. Token counts and block counts are int64, so that no sum can wrap."""

    __slots__ = (
        "_block_tokens",
        "_max_tokens",
        "arrival",
        "base",
        "capacity",
        "committed",
        "cover",
        "extents",
        "first_real",
        "hashed",
        "ids",
        "keyed",
        "known",
        "namespace",
        "next_fill",
        "priority",
        "records",
        "reserved_until",
        "room",
        "scratch",
        "serial",
        "session_of",
        "status",
        "tail",
        "token_base",
        "told_step",
    )  # fmt: skip

    def __init__(self, block_tokens: int, max_tokens: int, extents: Extents) -> None:
        self._block_tokens = block_tokens
        self._max_tokens = max_tokens
        self.extents = extents
        self.ids: U64 = np.zeros(0, np.uint64)
        """Sequence id, 0 while the row is free."""
        self.serial: I64 = np.zeros(0, np.int64)
        """Highest serial the row has had."""
        self.session_of: I64 = np.zeros(0, np.int64)
        self.status: U8 = np.zeros(0, np.uint8)
        self.told_step: I64 = np.zeros(0, np.int64)
        """Step whose response told the last change of state."""
        self.known: I64 = np.zeros(0, np.int64)
        self.committed: I64 = np.zeros(0, np.int64)
        self.cover: I64 = np.zeros(0, np.int64)
        """Token slots of the table: its length times the block size."""
        self.room: I64 = np.zeros(0, np.int64)
        """Tokens that fit the row's extent and the longest sequence."""
        self.base: I64 = np.zeros(0, np.int64)
        self.token_base: I64 = np.zeros(0, np.int64)
        """Index of the first token in the extents' flat token array."""
        self.capacity: I64 = np.zeros(0, np.int64)
        self.hashed: I64 = np.zeros(0, np.int64)
        """Leading blocks whose digests are known."""
        self.keyed: I64 = np.zeros(0, np.int64)
        """Leading blocks of which the last one depends on more than its tokens; 0: none does."""
        self.tail: U8 = np.zeros((0, DIGEST_BYTES), np.uint8)
        """Digest of block `hashed - 1`, or the root."""
        self.first_real: I64 = np.zeros(0, np.int64)
        """First table entry that is not null."""
        self.reserved_until: I64 = np.zeros(0, np.int64)
        """Table length promised at admission."""
        self.priority: I64 = np.zeros(0, np.int64)
        self.arrival: I64 = np.zeros(0, np.int64)
        self.namespace: U32 = np.zeros(0, np.uint32)
        self.next_fill: I64 = np.zeros(0, np.int64)
        """Committed length at which the next block is full; `NEVER` when the sequence publishes nothing."""
        self.scratch: I64 = np.zeros(0, np.int64)
        self.records: list[Sequence | None] = []

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows in all."""
        room = len(self.ids)
        if rows > room:
            more = max(rows, 2 * room) - room  # doubling: many small sessions must not copy all columns each
            for name in self.__slots__:
                column = getattr(self, name)
                if isinstance(column, np.ndarray):
                    setattr(self, name, np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)]))
        self.records += [None] * (rows - len(self.records))

    def record(self, row: int) -> Sequence:
        """The record of a row that is not free."""
        found = self.records[row]
        assert found is not None, f"row {row} is free"
        return found

    def table(self, row: int, first: int = 0) -> I64:
        """Table entries from index `first` on; a copy."""
        base = int(self.base[row])
        return self.extents.tables[base + first : base + int(self.cover[row]) // self._block_tokens].astype(np.int64)

    def held(self, row: int) -> I64:
        """Blocks of the table, tail first, without nulls."""
        return self.table(row, int(self.first_real[row]))[::-1]

    def token_bytes(self, row: int) -> bytes:
        """All known tokens of a running sequence, packed u32."""
        first = int(self.base[row]) * self._block_tokens
        return self.extents.tokens[first : first + int(self.known[row])].tobytes()

    def set_tail(self, row: int, digest: bytes) -> None:
        """Set the digest that the next hashed block follows."""
        self.tail[row] = np.frombuffer(digest, np.uint8)

    def open(self, sequence: Sequence, status: Status, told_step: int) -> None:
        """Occupy the record's row."""
        row = sequence.row
        self.records[row] = sequence
        self.ids[row] = sequence.sequence_id
        self.serial[row] = sequence.sequence_id >> 32
        self.session_of[row] = sequence.session_id
        self.status[row] = status
        self.told_step[row] = told_step
        self.known[row] = len(sequence.tokens) // 4
        self.committed[row] = 0
        self.namespace[row] = sequence.namespace_id
        self.keyed[row] = max(sequence.extra_keys, default=-1) + 1
        self.priority[row], self.arrival[row] = sequence.priority, sequence.arrival

    def start(self, row: int, table: I64, tokens: U32, committed: int, first_real: int, publishes: bool) -> None:
        """Give a row its table and tokens and let it run."""
        size = self._block_tokens
        base, capacity = self.extents.allocate(max(len(table), -(-len(tokens) // size)) + 1)
        self.extents.tables[base : base + len(table)] = table
        self.extents.tokens[base * size : base * size + len(tokens)] = tokens
        self._place(row, base, capacity)
        self.known[row], self.committed[row] = len(tokens), committed
        self.cover[row], self.first_real[row] = len(table) * size, first_real
        self.next_fill[row] = (committed // size + 1) * size if publishes else NEVER
        self.status[row] = Status.RUNNING

    def ensure_room(self, row: int, num_tokens: int) -> None:
        """Move a running row to a larger extent when `num_tokens` do not fit its own."""
        if num_tokens <= self.capacity[row] * self._block_tokens:
            return
        entries = -(-num_tokens // self._block_tokens) + 1
        base, capacity = self.extents.move(int(self.base[row]), int(self.capacity[row]), entries)
        self._place(row, base, capacity)

    def stop(self, row: int) -> I64:
        """Take a row's table and extent away; returns the blocks it held, tail first."""
        held = self.held(row) if self.status[row] == Status.RUNNING else NO_I64
        if self.status[row] == Status.RUNNING:
            self.extents.free(int(self.base[row]), int(self.capacity[row]))
        self.capacity[row] = self.room[row] = self.cover[row] = self.committed[row] = 0
        self.first_real[row] = self.hashed[row] = self.reserved_until[row] = 0
        return held

    def close(self, row: int) -> None:
        """Free a stopped row; its serial stays."""
        self.ids[row] = 0
        self.status[row] = Status.FREE
        self.records[row] = None

    def _place(self, row: int, base: int, capacity: int) -> None:
        self.base[row], self.capacity[row] = base, capacity
        self.token_base[row] = base * self._block_tokens
        self.room[row] = min(capacity * self._block_tokens, self._max_tokens)
