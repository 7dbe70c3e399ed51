"""Answers from the wire into values."""

from collections.abc import Iterable

from kvplane.client.values import (
    Admission,
    BlockCopy,
    HitReason,
    PoolStats,
    Preemption,
    SequenceState,
    Skipped,
    StateChange,
    StateReason,
    StepOperation,
)
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire.packed import unpack_u32, unpack_u64

_HIT_REASONS: dict[int, HitReason] = {int(reason): reason for reason in HitReason}
_STATE_REASONS: dict[int, StateReason] = {int(reason): reason for reason in StateReason}


def pool_stats(message: types_pb2.PoolStats) -> PoolStats:
    """Counters of a pool."""
    return PoolStats(
        message.free_blocks,
        message.cached_blocks,
        message.held_blocks,
        message.quarantined_blocks,
        message.reserved_blocks,
        message.query_tokens,
        message.hit_tokens,
        message.evicted_blocks,
        message.preemptions,
    )


def admissions(message: step_pb2.Admitted) -> tuple[Admission, ...]:
    """Admitted sequences. A reason that this release does not know becomes NONE."""
    if not message.sequence_ids:
        return ()
    ids = unpack_u64("admitted.sequence_ids", message.sequence_ids)
    count = len(ids)
    cached = unpack_u32("admitted.cached_tokens", message.cached_tokens, count)
    slots = unpack_u32("admitted.num_slots", message.num_slots, count)
    reasons = unpack_u32("admitted.hit_reasons", message.hit_reasons, count)
    return tuple(
        Admission(sequence_id, tokens, covered, hit_reason(reason))
        for sequence_id, tokens, covered, reason in zip(
            ids.tolist(), cached.tolist(), slots.tolist(), reasons.tolist(), strict=True
        )
    )


def hit_reason(number: int) -> HitReason:
    """A reason of the wire."""
    return _HIT_REASONS.get(number, HitReason.NONE)


def state_changes(message: step_pb2.StateChanges) -> tuple[StateChange, ...]:
    """Sequences whose state changed."""
    if not message.sequence_ids:
        return ()
    ids = unpack_u64("state_changes.sequence_ids", message.sequence_ids)
    states = unpack_u32("state_changes.states", message.states, len(ids))
    reasons = unpack_u32("state_changes.reasons", message.reasons, len(ids))
    return tuple(
        StateChange(sequence_id, SequenceState(state), _STATE_REASONS.get(reason, StateReason.NONE))
        for sequence_id, state, reason in zip(ids.tolist(), states.tolist(), reasons.tolist(), strict=True)
    )


def preemptions(messages: Iterable[step_pb2.Preemption]) -> tuple[Preemption, ...]:
    """Victims with their explanation."""
    return tuple(
        Preemption(
            each.sequence_id,
            each.reason,
            each.cost_tokens,
            each.num_blocks,
            each.beneficiary_sequence_id if each.HasField("beneficiary_sequence_id") else None,
            each.candidates,
            each.blocks_needed,
        )
        for each in messages
    )


def skipped(message: step_pb2.Skipped) -> tuple[Skipped, ...]:
    """Operations that were not applied."""
    if not message.sequence_ids:
        return ()
    ids = unpack_u64("skipped.sequence_ids", message.sequence_ids)
    operations = unpack_u32("skipped.operations", message.operations, len(ids))
    return tuple(
        Skipped(sequence_id, StepOperation(operation))
        for sequence_id, operation in zip(ids.tolist(), operations.tolist(), strict=True)
    )


def copies(messages: Iterable[types_pb2.Transfer], step_id: int) -> tuple[BlockCopy, ...]:
    """Copies to run."""
    return tuple(
        BlockCopy(
            each.op_id,
            int(unpack_u32("source.block_ids", each.source[0].block_ids, 1)[0]),
            int(unpack_u32("destination.block_ids", each.destination[0].block_ids, 1)[0]),
            int(unpack_u32("slots", each.slots, 1)[0]),
            step_id,
            int(unpack_u64("destination.generations", each.destination[0].generations, 1)[0]),
        )
        for each in messages
    )
