"""What a session answers: frozen values with the contract's numbers as enumerations."""

from dataclasses import dataclass
from enum import IntEnum

from kvplane.v1 import cache_pb2, step_pb2, types_pb2


class SequenceState(IntEnum):
    """Where a sequence is in its life."""

    WAITING = step_pb2.SEQUENCE_STATE_WAITING
    LOADING = step_pb2.SEQUENCE_STATE_LOADING
    RUNNING = step_pb2.SEQUENCE_STATE_RUNNING
    STALLED = step_pb2.SEQUENCE_STATE_STALLED
    PREEMPTED = step_pb2.SEQUENCE_STATE_PREEMPTED
    FINISHED = step_pb2.SEQUENCE_STATE_FINISHED


class StateReason(IntEnum):
    """Why a sequence is in its state."""

    NONE = step_pb2.STATE_REASON_UNSPECIFIED
    NO_BLOCKS = step_pb2.STATE_REASON_NO_BLOCKS
    BLOCKS_COMING = step_pb2.STATE_REASON_BLOCKS_COMING
    PREFIX_PENDING = step_pb2.STATE_REASON_PREFIX_PENDING
    TENANT_CEILING = step_pb2.STATE_REASON_TENANT_CEILING
    STEP_LIMIT = step_pb2.STATE_REASON_STEP_LIMIT
    PREEMPTED = step_pb2.STATE_REASON_PREEMPTED
    REVOKED = step_pb2.STATE_REASON_REVOKED
    FINISHED = step_pb2.STATE_REASON_FINISHED
    POOL_LOST = step_pb2.STATE_REASON_POOL_LOST
    TRANSFER_FAILED = step_pb2.STATE_REASON_TRANSFER_FAILED
    POOL_NOT_READY = step_pb2.STATE_REASON_POOL_NOT_READY
    YIELDS_TO_OLDER = step_pb2.STATE_REASON_YIELDS_TO_OLDER
    STEP_PREEMPTED = step_pb2.STATE_REASON_STEP_PREEMPTED
    NO_VICTIM = step_pb2.STATE_REASON_NO_VICTIM
    PARENT_NOT_RUNNING = step_pb2.STATE_REASON_PARENT_NOT_RUNNING
    NOT_DRAINED = step_pb2.STATE_REASON_NOT_DRAINED


class HitReason(IntEnum):
    """Why a prefix hit ended where it did."""

    NONE = types_pb2.HIT_REASON_UNSPECIFIED
    FULL = types_pb2.HIT_REASON_FULL
    TOO_SHORT = types_pb2.HIT_REASON_TOO_SHORT
    PENDING = types_pb2.HIT_REASON_PENDING
    NEVER_SEEN = types_pb2.HIT_REASON_NEVER_SEEN
    EVICTED = types_pb2.HIT_REASON_EVICTED
    READ_OFF = types_pb2.HIT_REASON_READ_OFF
    CAPPED = types_pb2.HIT_REASON_CAPPED
    OTHER_GROUP = types_pb2.HIT_REASON_OTHER_GROUP
    OTHER_NAMESPACE = types_pb2.HIT_REASON_OTHER_NAMESPACE
    REMOVED = types_pb2.HIT_REASON_REMOVED
    WRITER_TOO_SLOW = types_pb2.HIT_REASON_WRITER_TOO_SLOW
    CACHING_OFF = types_pb2.HIT_REASON_CACHING_OFF


class FinishReason(IntEnum):
    """Why a sequence ended."""

    STOP = step_pb2.FINISH_REASON_STOP
    LENGTH = step_pb2.FINISH_REASON_LENGTH
    ABORT = step_pb2.FINISH_REASON_ABORT
    ERROR = step_pb2.FINISH_REASON_ERROR


class StepOperation(IntEnum):
    """An operation of a step."""

    ACKNOWLEDGE = step_pb2.STEP_OPERATION_ACKNOWLEDGE
    OBSERVE = step_pb2.STEP_OPERATION_OBSERVE
    COMMIT = step_pb2.STEP_OPERATION_COMMIT
    ROLLBACK = step_pb2.STEP_OPERATION_ROLLBACK
    FORK = step_pb2.STEP_OPERATION_FORK
    FINISH = step_pb2.STEP_OPERATION_FINISH
    EXTEND = step_pb2.STEP_OPERATION_EXTEND
    ADVANCE = step_pb2.STEP_OPERATION_ADVANCE
    ADMIT = step_pb2.STEP_OPERATION_ADMIT


@dataclass(frozen=True, slots=True)
class Hit:
    """How much of a prompt is published."""

    tokens: int
    reason: HitReason


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that runs from now on: compute its tokens from `cached_tokens` on, up to `num_slots`."""

    sequence_id: int
    cached_tokens: int
    """Tokens whose KV is there already."""
    num_slots: int
    """Token slots that the block table covers."""
    hit_reason: HitReason


@dataclass(frozen=True, slots=True)
class StateChange:
    """A sequence whose state or reason changed."""

    sequence_id: int
    state: SequenceState
    reason: StateReason


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence of this session that had to yield, and why. It keeps its tokens and waits for `readmit`."""

    sequence_id: int
    reason: str
    """Rule that chose it."""
    cost_tokens: int
    """Tokens to compute again when it comes back, net of what stays cached."""
    num_blocks: int
    """Blocks that it gave."""
    beneficiary: int | None
    """Sequence that needed them; None when it belongs to another session."""
    candidates: int
    """Running sequences that the policy chose among."""
    blocks_needed: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """An operation that was not applied: its sequence had yielded in a result that was not collected yet."""

    sequence_id: int
    operation: StepOperation


@dataclass(frozen=True, slots=True)
class Cut:
    """A sequence that kept only a part of its table over a restart of the cache service."""

    sequence_id: int
    num_slots: int
    """Token slots that it kept: what was committed up to there still is, the rest is to be written again. 0: it holds
    nothing, and waits for `readmit` like a preempted one."""
    reason: str


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A partial tail to copy before its destination is written or read (forks)."""

    op_id: int
    source_id: int
    destination_id: int
    num_slots: int
    """Leading token slots that hold something."""
    step_id: int
    destination_generation: int
    """Occupant that the copy is for: with another one in the destination it is not to be run."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters of the pool after a step."""

    free_blocks: int
    cached_blocks: int
    held_blocks: int
    quarantined_blocks: int
    reserved_blocks: int
    query_tokens: int
    hit_tokens: int
    evicted_blocks: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to an applied step: only what changed. Tables are in `Session.sequences`."""

    step_id: int
    published_step: int
    """Newest step whose filled blocks can be hit by others."""
    pool: PoolStats
    admitted: tuple[Admission, ...] = ()
    changes: tuple[StateChange, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    """Victims of this session's own need."""
    revocations: tuple[Preemption, ...] = ()
    """Sequences of this session that yielded to another session since the last result. Launch nothing on them; the
    session acknowledges when what was launched before has completed."""
    skipped: tuple[Skipped, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    notices: tuple[cache_pb2.Notice, ...] = ()
    """Other notices since the last result: pool state, capacity, namespaces, draining, lease."""
    cuts: tuple[Cut, ...] = ()
    """What a restart of the cache service cost since the last result. Read them first: they are older than the rest."""
