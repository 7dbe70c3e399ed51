"""What comes out of a step: deltas only, and every decision with its explanation."""

from dataclasses import dataclass
from enum import IntEnum

from kvplane.cache.core.arrays import U32, U64


class SequenceState(IntEnum):
    """Where a sequence stands. `STALLED` runs, holds its blocks, and lacks slots for its next tokens."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4
    STALLED = 5


class Reason(IntEnum):
    """Why a sequence is in its state."""

    NONE = 0
    NO_SPACE = 1
    """Its need net of hits plus the watermark does not fit beside what is promised already."""
    PREFIX_PENDING = 2
    """Another sequence is writing its next block; waiting for it is cheaper than computing it again."""
    STEP_LIMIT = 3
    """The step's count or token budget is spent."""
    PREEMPTED_THIS_STEP = 4
    """The step had to preempt; admitting in the same breath would only preempt again."""
    BEHIND_AGED = 5
    """A request that was passed too often goes first."""
    POOL_NOT_READY = 6
    """Nothing is allocated without a live control stream to every shard."""
    BLOCKS_COMING = 7
    """Blocks in quarantine will do; preempting more would free nothing sooner."""
    NO_VICTIM = 8
    SHORTAGE = 9
    """Preempted: its blocks serve a sequence that comes first."""
    PARENT_NOT_RUNNING = 10
    COPY_FAILED = 11
    FINISHED_BY_CLIENT = 12
    NOT_DRAINED = 13
    """Revoked, and its session has not said yet that nothing runs on its blocks."""


class HitReason(IntEnum):
    """Why an admission hit as many tokens as it did and not more."""

    FULL = 1
    """All that may hit: at least one token is always computed."""
    TOO_SHORT = 2
    READ_OFF = 3
    CACHING_OFF = 4
    NEVER_SEEN = 5
    """Also when the prefix is known in another namespace only: a digest does not tell."""
    EVICTED = 6
    CAPPED = 7
    """`max_hit_tokens` ended the hit."""
    WRITER_TOO_SLOW = 8
    """The next block is being written elsewhere, without progress: computed here as well."""


class Operation(IntEnum):
    """Operations of a step that can be skipped."""

    ADVANCE = 1
    COMMIT = 2
    ROLLBACK = 3
    FORK = 4
    EXTEND = 5
    ADMIT = 6


@dataclass(frozen=True, slots=True)
class TableDeltas:
    """Changes of block tables: entry `i` puts `counts[i]` blocks at index `starts[i]` of one table.

    `block_ids` (u32) and `generations` (u64) are the concatenation over the entries; id 0 with generation 0
    says that the entry has left the sliding window.
    """

    sequence_ids: U64
    groups: U32
    starts: U32
    counts: U32
    block_ids: U32
    generations: U64

    def __len__(self) -> int:
        return len(self.sequence_ids)


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that runs now: `cached_tokens` of its `num_slots` slots need no computing."""

    sequence_id: int
    cached_tokens: int
    num_slots: int
    hit_reason: HitReason
    resumed: bool
    """It had run before and was preempted."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """A sequence of this session that changed its state, or stays where it is against the step's wish."""

    sequence_id: int
    state: SequenceState
    reason: Reason = Reason.NONE


@dataclass(frozen=True, slots=True)
class Skipped:
    """An operation on a sequence whose change of state the sender could not know yet."""

    operation: Operation
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `num_slots` slots of a block before the destination is first written.

    The source stays pinned until a `TransferAck` with `op_id` arrives.
    """

    op_id: int
    source_id: int
    source_generation: int
    destination_id: int
    destination_generation: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """Who yielded to whom, and what it costs."""

    session_id: int
    """Session of the victim; when it is not the step's own, the victim is revoked by a notice."""
    sequence_id: int
    reason: Reason
    requester_id: int
    """Sequence that needed the blocks."""
    blocks_needed: int
    blocks_freed: int
    """References given up; shared blocks stay with their other holders."""
    tokens_to_recompute: int
    """Committed tokens that are not published, so that resuming cannot hit them."""
    candidates: int
    """Running sequences the policy chose among."""
    rule: str
    """Name of the policy's rule that decided."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Blocks by state (their sum is the pool without the null block) and totals since the start."""

    free: int
    cached: int
    held: int
    quarantined: int
    reserved: int
    """Blocks promised to prompts that were admitted and not allocated yet."""
    query_tokens: int
    hit_tokens: int
    evicted_blocks: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Answer to one step."""

    step_id: int
    statistics: PoolStatistics
    tables: tuple[TableDeltas, ...] = ()
    admissions: tuple[Admission, ...] = ()
    states: tuple[StateChange, ...] = ()
    copies: tuple[Copy, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    preemptions: tuple[Preemption, ...] = ()


class CutReason(IntEnum):
    """Why a declared sequence was cut."""

    CLAIMED_TWICE = 1
    """The block is held by somebody else, and is not a sealed one."""
    STALE_GENERATION = 2
    """The block has a newer occupant."""
    DIGEST_DIFFERS = 3
    """The block is sealed with another digest than that of the tokens, or beyond what was committed."""
    NOT_GRANTED = 4
    """A shard never granted the block to this sequence."""
    TOO_LATE = 5
    """The pool has opened, and the block is not sealed."""
    NEVER_WRITTEN = 6
    """The block was reserved by an older start of the control plane, and nobody may stamp that any more."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A declared sequence that keeps the first `num_tokens` slots of its table; none: it is preempted."""

    sequence_id: int
    num_tokens: int
    reason: CutReason
