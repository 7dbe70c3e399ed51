"""Slots for running sequences: extend their tables, and let others yield when blocks run out."""

import numpy as np

from kvplane.cache.core.arrays import I64, spans
from kvplane.cache.core.preemption import RunningSequences
from kvplane.cache.core.results import Preemption, Reason, SequenceState
from kvplane.cache.core.sequences import NEVER, Status
from kvplane.cache.core.state import PoolState, StepContext


def extend(state: PoolState, context: StepContext, rows: I64, counts: I64) -> None:
    """Append `counts` blocks to the tables of running `rows`.

    All at once when the pool has the blocks; otherwise one after the other, in the order given, each either
    served by preemptions or reported as stalled.
    """
    total = int(counts.sum())
    if total > state.pool.free:
        state.sealing.settle()
    if state.ready and total <= state.pool.available:
        _grant(state, context, rows, counts, state.pool.take(total))
        return
    columns = state.rows
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        if columns.status[row] != Status.RUNNING:
            continue  # it yielded to one before it
        reason = _make_room(state, context, row, count) if state.ready else Reason.POOL_NOT_READY
        if reason == Reason.NONE:
            _grant(state, context, np.array([row]), np.array([count]), state.pool.take(count))
        elif columns.status[row] == Status.RUNNING:
            context.changed(int(columns.ids[row]), SequenceState.STALLED, reason)


def preempt(
    state: PoolState,
    context: StepContext,
    row: int,
    requester: int,
    needed: int,
    reason: Reason,
    candidates: int,
) -> None:
    """Stop a running sequence: its tokens are kept, its blocks released, its published ones stay cached."""
    columns = state.rows
    sequence = columns.record(row)
    session = state.sessions[sequence.session_id]
    committed = int(columns.committed[row])
    published = int(np.count_nonzero(state.columns.indexed[columns.held(row)]))
    blocks = stop(state, row)
    columns.status[row] = Status.PREEMPTED
    if session is context.session:
        session.deferred.release(blocks, context.last_launched)
        columns.told_step[row] = context.step_id
        context.changed(sequence.sequence_id, SequenceState.PREEMPTED, reason)
    else:
        session.deferred.release_when_drained(sequence.sequence_id, blocks)
        columns.told_step[row] = NEVER
    state.preemptions += 1
    context.preemptions.append(
        Preemption(
            session_id=session.session_id,
            sequence_id=sequence.sequence_id,
            reason=reason,
            requester_id=int(columns.ids[requester]),
            blocks_needed=needed,
            blocks_freed=len(blocks),
            tokens_to_recompute=max(0, committed - published * state.config.block_tokens),
            candidates=candidates,
            rule=state.preemption_policy.rule,
        )
    )


def stop(state: PoolState, row: int) -> I64:
    """Take a running sequence off its blocks, keeping its tokens; returns the blocks, tail first."""
    columns = state.rows
    sequence = columns.record(row)
    state.set_frontier(sequence, None)
    state.unreserve(row)
    sequence.tokens = columns.token_bytes(row)
    sequence.copies.clear()
    state.sessions[sequence.session_id].layout += 1
    state.running -= 1
    return columns.stop(row)


def _make_room(state: PoolState, context: StepContext, row: int, count: int) -> Reason:
    """Preempt until `count` blocks are available; the reason when `row` has to stall or yields itself."""
    while state.pool.available < count:
        if state.pool.available + state.coming_soon() >= count:
            return Reason.BLOCKS_COMING
        running = np.flatnonzero(state.rows.status == Status.RUNNING)
        if len(running) == 1:
            return Reason.NO_VICTIM
        victim = int(running[state.preemption_policy.victim(_snapshot(state, running, row))])
        preempt(state, context, victim, row, count, Reason.SHORTAGE, len(running))
        if victim == row:
            return Reason.SHORTAGE
    return Reason.NONE


def _snapshot(state: PoolState, running: I64, requester: int) -> RunningSequences:
    columns = state.rows
    return RunningSequences(
        columns.ids[running],
        columns.session_of[running],
        columns.priority[running],
        columns.arrival[running],
        columns.committed[running],
        int(np.flatnonzero(running == requester)[0]),
    )


def _grant(state: PoolState, context: StepContext, rows: I64, counts: I64, ids: I64) -> None:
    columns, size = state.rows, state.block_size
    starts = columns.cover[rows] // size
    ends = starts + counts
    for index in (ends > columns.capacity[rows]).nonzero()[0].tolist():
        columns.ensure_room(int(rows[index]), int(ends[index] * size))
    entries = columns.base[rows] + starts
    columns.extents.tables[entries if len(ids) == len(rows) else spans(entries, counts)] = ids
    columns.cover[rows] = ends * size
    if state.reserved:
        open_promise = np.maximum(columns.reserved_until[rows] - starts, 0)
        state.reserved -= int(np.minimum(open_promise, counts).sum())
    context.put_many(state, rows, starts, counts, ids)
