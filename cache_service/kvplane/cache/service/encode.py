"""The core's answers onto the wire: deltas as packed arrays, never a message per block."""

from collections.abc import Sequence

import numpy as np

from kvplane.cache.core import (
    Admission,
    Copy,
    HitReason,
    Operation,
    PoolStatistics,
    Preemption,
    Reason,
    SequenceState,
    Skipped,
    StateChange,
    StepResult,
    TableDeltas,
)
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire.packed import pack_u32, pack_u64

STATES = {
    SequenceState.WAITING: step_pb2.SEQUENCE_STATE_WAITING,
    SequenceState.RUNNING: step_pb2.SEQUENCE_STATE_RUNNING,
    SequenceState.PREEMPTED: step_pb2.SEQUENCE_STATE_PREEMPTED,
    SequenceState.FINISHED: step_pb2.SEQUENCE_STATE_FINISHED,
    SequenceState.STALLED: step_pb2.SEQUENCE_STATE_STALLED,
}

REASONS = {
    Reason.NONE: step_pb2.STATE_REASON_UNSPECIFIED,
    Reason.NO_SPACE: step_pb2.STATE_REASON_NO_BLOCKS,
    Reason.PREFIX_PENDING: step_pb2.STATE_REASON_PREFIX_PENDING,
    Reason.STEP_LIMIT: step_pb2.STATE_REASON_STEP_LIMIT,
    Reason.PREEMPTED_THIS_STEP: step_pb2.STATE_REASON_STEP_PREEMPTED,
    Reason.BEHIND_AGED: step_pb2.STATE_REASON_YIELDS_TO_OLDER,
    Reason.POOL_NOT_READY: step_pb2.STATE_REASON_POOL_NOT_READY,
    Reason.BLOCKS_COMING: step_pb2.STATE_REASON_BLOCKS_COMING,
    Reason.NO_VICTIM: step_pb2.STATE_REASON_NO_VICTIM,
    Reason.SHORTAGE: step_pb2.STATE_REASON_PREEMPTED,
    Reason.PARENT_NOT_RUNNING: step_pb2.STATE_REASON_PARENT_NOT_RUNNING,
    Reason.COPY_FAILED: step_pb2.STATE_REASON_TRANSFER_FAILED,
    Reason.NOT_DRAINED: step_pb2.STATE_REASON_NOT_DRAINED,
    Reason.FINISHED_BY_CLIENT: step_pb2.STATE_REASON_FINISHED,
}

HIT_REASONS = {
    HitReason.FULL: types_pb2.HIT_REASON_FULL,
    HitReason.TOO_SHORT: types_pb2.HIT_REASON_TOO_SHORT,
    HitReason.READ_OFF: types_pb2.HIT_REASON_READ_OFF,
    HitReason.CACHING_OFF: types_pb2.HIT_REASON_CACHING_OFF,
    HitReason.NEVER_SEEN: types_pb2.HIT_REASON_NEVER_SEEN,
    HitReason.EVICTED: types_pb2.HIT_REASON_EVICTED,
    HitReason.CAPPED: types_pb2.HIT_REASON_CAPPED,
    HitReason.WRITER_TOO_SLOW: types_pb2.HIT_REASON_WRITER_TOO_SLOW,
}

OPERATIONS = {
    Operation.ADVANCE: step_pb2.STEP_OPERATION_ADVANCE,
    Operation.COMMIT: step_pb2.STEP_OPERATION_COMMIT,
    Operation.ROLLBACK: step_pb2.STEP_OPERATION_ROLLBACK,
    Operation.FORK: step_pb2.STEP_OPERATION_FORK,
    Operation.EXTEND: step_pb2.STEP_OPERATION_EXTEND,
    Operation.ADMIT: step_pb2.STEP_OPERATION_ADMIT,
}


def encode_result(message: step_pb2.StepResult, result: StepResult, session_id: int, published_step: int) -> None:
    """Write the answer to an applied step into `message`: in place, since every nested message that is passed to a
    constructor is copied. Victims of other sessions are left out: they get notices."""
    message.step_id = result.step_id
    message.published_step = published_step
    for tables in result.tables:
        _table(message.table_deltas.add(), tables)
    write_statistics(message.stats, result.statistics)
    if result.admissions:
        message.admitted.CopyFrom(_admitted(result.admissions))
    if result.states:
        message.state_changes.CopyFrom(_state_changes(result.states))
    if result.copies:
        message.transfers.extend(_transfer(copy) for copy in result.copies)
    if result.skipped:
        message.skipped.CopyFrom(_skipped(result.skipped))
    if result.preemptions:
        own = [each for each in result.preemptions if each.session_id == session_id]
        message.preemptions.extend(encode_preemption(each, with_beneficiary=True) for each in own)


def _table(message: types_pb2.TableDelta, tables: TableDeltas) -> None:
    blocks = message.blocks
    if len(tables) and tables.groups[0]:
        blocks.group = int(tables.groups[0])
    blocks.block_ids = tables.block_ids.tobytes()
    blocks.generations = tables.generations.tobytes()
    message.sequence_ids = tables.sequence_ids.tobytes()
    message.starts = tables.starts.tobytes()
    message.counts = tables.counts.tobytes()


def write_statistics(message: types_pb2.PoolStats, statistics: PoolStatistics) -> None:
    """Write one line of counters into `message`."""
    message.free_blocks = statistics.free
    message.cached_blocks = statistics.cached
    message.held_blocks = statistics.held
    message.quarantined_blocks = statistics.quarantined
    message.reserved_blocks = statistics.reserved
    message.query_tokens = statistics.query_tokens
    message.hit_tokens = statistics.hit_tokens
    message.evicted_blocks = statistics.evicted_blocks
    message.preemptions = statistics.preemptions


def encode_preemption(preemption: Preemption, *, with_beneficiary: bool) -> step_pb2.Preemption:
    """A decision that a sequence yields, with its explanation. Another session's beneficiary is not told."""
    message = step_pb2.Preemption(
        sequence_id=preemption.sequence_id,
        kind=step_pb2.PREEMPTION_KIND_RECOMPUTE,
        reason=preemption.rule,
        cost_tokens=preemption.tokens_to_recompute,
        num_blocks=preemption.blocks_freed,
        candidates=preemption.candidates,
        blocks_needed=preemption.blocks_needed,
    )
    if with_beneficiary:
        message.beneficiary_sequence_id = preemption.requester_id
    return message


def _admitted(admissions: Sequence[Admission]) -> step_pb2.Admitted:
    return step_pb2.Admitted(
        sequence_ids=pack_u64([each.sequence_id for each in admissions]),
        cached_tokens=pack_u32([each.cached_tokens for each in admissions]),
        num_slots=pack_u32([each.num_slots for each in admissions]),
        hit_reasons=pack_u32([HIT_REASONS[each.hit_reason] for each in admissions]),
    )


def _state_changes(states: Sequence[StateChange]) -> step_pb2.StateChanges:
    return step_pb2.StateChanges(
        sequence_ids=pack_u64([each.sequence_id for each in states]),
        states=pack_u32([STATES[each.state] for each in states]),
        reasons=pack_u32([REASONS[each.reason] for each in states]),
    )


def _skipped(skipped: Sequence[Skipped]) -> step_pb2.Skipped:
    return step_pb2.Skipped(
        sequence_ids=pack_u64([each.sequence_id for each in skipped]),
        operations=pack_u32([OPERATIONS[each.operation] for each in skipped]),
    )


def _transfer(copy: Copy) -> types_pb2.Transfer:
    return types_pb2.Transfer(
        op_id=copy.op_id,
        kind=types_pb2.TRANSFER_KIND_COPY,
        source=[_block(copy.source_id, copy.source_generation)],
        destination=[_block(copy.destination_id, copy.destination_generation)],
        slots=pack_u32([copy.num_slots]),
    )


def _block(block_id: int, generation: int) -> types_pb2.BlockList:
    return types_pb2.BlockList(
        block_ids=pack_u32(np.array([block_id], np.uint32)), generations=pack_u64(np.array([generation], np.uint64))
    )
