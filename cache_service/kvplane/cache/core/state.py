"""Everything a pool consists of, and the few moves that several operations share."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvplane.cache.core.arrays import I64
from kvplane.cache.core.blocks import BlockPool
from kvplane.cache.core.chains import Namespaces
from kvplane.cache.core.columns import BlockColumns
from kvplane.cache.core.config import CoreConfig
from kvplane.cache.core.groups import GroupRules
from kvplane.cache.core.preemption import PreemptionPolicy
from kvplane.cache.core.results import (
    Admission,
    Copy,
    Operation,
    PoolStatistics,
    Preemption,
    Reason,
    SequenceState,
    Skipped,
    StateChange,
    TableDeltas,
)
from kvplane.cache.core.sealing import Sealing
from kvplane.cache.core.sequences import Sequence, SequenceRows
from kvplane.cache.core.sessions import Session
from kvplane.wire.identity import Digest

if TYPE_CHECKING:
    from kvplane.cache.core.recovery import Recovery


@dataclass(slots=True)
class PendingCopy:
    """A copy under way."""

    copy: Copy
    row: int
    """Row of the sequence that owns the destination."""
    sequence_id: int
    session_id: int
    pinned: I64
    """The source, tail first, and the table before it."""


@dataclass(slots=True)
class PoolState:
    """The parts of a pool. Operations are functions over it; nothing here decides."""

    config: CoreConfig
    rules: GroupRules
    columns: BlockColumns
    pool: BlockPool
    preemption_policy: PreemptionPolicy
    namespaces: Namespaces
    rows: SequenceRows
    sealing: Sealing
    sessions: dict[int, Session] = field(default_factory=dict)
    writers: dict[Digest, int] = field(default_factory=dict)
    """Digest of a prompt block being written -> row of its writer."""
    copies: dict[int, PendingCopy] = field(default_factory=dict)
    refused: dict[int, Sequence] = field(default_factory=dict)
    """Sequences that did not fit, by id, longest refused first."""
    recovery: "Recovery | None" = None
    """The restart of the control plane that the pool is recovering from."""
    ready: bool = True
    """Every shard has a live control stream (I11): without it nothing is allocated."""
    tick: int = 0
    """Steps applied to the pool, all sessions together."""
    running: int = 0
    reserved: int = 0
    """Blocks promised to admitted prompts and not allocated."""
    admissions: int = 0
    arrivals: int = 0
    last_op_id: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    block_size: np.int64 = field(init=False)
    """Tokens of a block as an array scalar: half the price of a Python int in array arithmetic."""

    def __post_init__(self) -> None:
        self.block_size = np.int64(self.config.block_tokens)

    def statistics(self) -> PoolStatistics:
        """Blocks by state and totals."""
        pool = self.pool
        return PoolStatistics(
            pool.free,
            len(pool.policy),
            pool.held,
            pool.quarantined,
            self.reserved,
            self.query_tokens,
            self.hit_tokens,
            pool.evicted_blocks,
            self.preemptions,
        )

    def coming_soon(self) -> int:
        """At most how many blocks the sessions' progress will bring back."""
        bound = sum(session.deferred.coming for session in self.sessions.values() if not session.ended)
        return min(self.pool.quarantined, bound)

    def reserve(self, row: int, table_blocks: int) -> None:
        """Promise a row a table of `table_blocks` blocks."""
        self.rows.reserved_until[row] = table_blocks
        self.reserved += max(0, table_blocks - int(self.rows.cover[row]) // self.config.block_tokens)

    def unreserve(self, row: int) -> None:
        """Take back what is left of a row's promise."""
        length = int(self.rows.cover[row]) // self.config.block_tokens
        self.reserved -= max(0, int(self.rows.reserved_until[row]) - length)
        self.rows.reserved_until[row] = 0

    def set_frontier(self, sequence: Sequence, index: int | None) -> None:
        """Say which prompt block `sequence` writes next: others wait for it instead of writing it too."""
        if sequence.frontier is not None:
            digest = sequence.chain.digest(sequence.frontier)
            if self.writers.get(digest) == sequence.row:
                del self.writers[digest]
        sequence.frontier = index if index is not None and index < len(sequence.chain) else None
        if sequence.frontier is not None:
            self.writers.setdefault(sequence.chain.digest(sequence.frontier), sequence.row)


@dataclass(slots=True)
class StepContext:
    """One step being applied: who sent it, when, and what it has led to so far."""

    session: Session
    step_id: int
    now: float
    tables: list[TableDeltas] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    states: list[StateChange] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)

    @property
    def last_launched(self) -> int:
        """Newest step that may have launched work on a block that this step releases."""
        return self.step_id - 1

    def changed(self, sequence_id: int, state: SequenceState, reason: Reason = Reason.NONE) -> None:
        """Report a state."""
        self.states.append(StateChange(sequence_id, state, reason))

    def skip(self, operation: Operation, sequence_ids: list[int]) -> None:
        """Report skipped operations."""
        self.skipped += [Skipped(operation, sequence_id) for sequence_id in sequence_ids]

    def put(self, state: PoolState, row: int, start: int) -> None:
        """Report a row's table from index `start` on."""
        ids = state.rows.table(row, start)
        self.put_many(state, np.array([row]), np.array([start]), np.array([len(ids)]), ids)

    def put_many(self, state: PoolState, rows: I64, starts: I64, counts: I64, ids: I64) -> None:
        """Report new entries of several tables; `ids` is the concatenation of their blocks."""
        self.tables.append(
            TableDeltas(
                state.rows.ids[rows],
                np.zeros(len(rows), np.uint32),
                starts.astype(np.uint32),
                counts.astype(np.uint32),
                ids.astype(np.uint32),
                state.columns.generation[ids],
            )
        )
