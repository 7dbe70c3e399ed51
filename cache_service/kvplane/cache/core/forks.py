"""Forks: children share full committed blocks by reference and copy the partial tail (I5)."""

import numpy as np

from kvplane.cache.core.arrays import I64
from kvplane.cache.core.growth import preempt
from kvplane.cache.core.results import Copy, Reason, SequenceState
from kvplane.cache.core.sequences import Sequence, Status
from kvplane.cache.core.state import PendingCopy, PoolState, StepContext
from kvplane.wire.errors import InvalidArgumentError


def fork(state: PoolState, context: StepContext, parent_row: int, child_id: int) -> None:
    """A child with all that the parent has committed and knows.

    When its own tail block does not fit, or the parent does not run, the child waits with the parent's
    tokens and is admitted like a preempted sequence.
    """
    columns, size = state.rows, state.config.block_tokens
    parent = columns.record(parent_row)
    running = columns.status[parent_row] == Status.RUNNING
    state.arrivals += 1
    child = Sequence(
        sequence_id=child_id,
        session_id=parent.session_id,
        row=context.session.first_row + (child_id & 0xFFFF_FFFF),
        namespace_id=parent.namespace_id,
        read_cache=parent.read_cache,
        write_cache=parent.write_cache,
        max_hit_tokens=parent.max_hit_tokens,
        extra_keys=parent.extra_keys,
        priority=parent.priority,
        arrival=parent.arrival if parent.ranked else state.arrivals,
        ranked=parent.ranked,
        chain=parent.chain,
        tokens=columns.token_bytes(parent_row) if running else parent.tokens,
    )
    columns.open(child, Status.WAITING, context.step_id)
    context.session.layout += 1
    committed = int(columns.committed[parent_row])
    full, partial = divmod(committed, size)
    fits = state.ready and state.pool.available >= (partial > 0)
    if not running or not fits:
        child.waiting_reason = Reason.NO_SPACE if running else Reason.PARENT_NOT_RUNNING
        context.changed(child_id, SequenceState.WAITING, child.waiting_reason)
        return
    row, first_real = child.row, int(columns.first_real[parent_row])
    shared = columns.table(parent_row)[:full]
    state.pool.hold(shared[first_real:])
    table = np.concatenate([shared, state.pool.take(1)]) if partial else shared
    tokens = np.frombuffer(child.tokens, np.uint32)
    columns.start(row, table, tokens, committed, min(first_real, len(table)), publishes=False)
    child.tokens = b""
    columns.hashed[row] = columns.hashed[parent_row]
    columns.tail[row] = columns.tail[parent_row]
    columns.next_fill[row] = columns.next_fill[parent_row]
    state.running += 1
    context.changed(child_id, SequenceState.RUNNING)
    context.put(state, row, 0)
    if partial:
        _copy(state, context, child, columns.table(parent_row)[first_real : full + 1], int(table[full]), partial)


def acknowledge_copy(state: PoolState, context: StepContext, op_id: int, succeeded: bool) -> None:
    """Unpin the source. A failed copy leaves its owner without valid bytes: it computes them again."""
    row = owner_of_copy(state, op_id)
    state.pool.release(state.copies.pop(op_id).pinned)
    if row is None:
        return
    state.rows.record(row).copies.discard(op_id)
    if not succeeded:
        preempt(state, context, row, row, 0, Reason.COPY_FAILED, 1)


def owner_of_copy(state: PoolState, op_id: int) -> int | None:
    """Row of the sequence that still relies on a copy under way; None when it ended or lost its blocks."""
    pending = state.copies[op_id]
    if state.rows.ids[pending.row] != pending.sequence_id:
        return None
    return pending.row if op_id in state.rows.record(pending.row).copies else None


def check_copy(state: PoolState, context_session: int, op_id: int, field: str) -> None:
    """Raises `InvalidArgumentError` unless the copy is under way for this session."""
    pending = state.copies.get(op_id)
    if pending is None or pending.session_id != context_session:
        raise InvalidArgumentError.of(field, f"copy {op_id} is not under way")


def _copy(
    state: PoolState, context: StepContext, child: Sequence, pinned: I64, destination: int, num_slots: int
) -> None:
    """Pin the source, and with it all before it: a pinned block keeps its ancestors as a holder does (I4)."""
    state.pool.hold(pinned)
    state.last_op_id += 1
    generation, source = state.columns.generation, int(pinned[-1])
    copy = Copy(
        state.last_op_id,
        source,
        int(generation[source]),
        destination,
        int(generation[destination]),
        num_slots,
    )
    state.copies[copy.op_id] = PendingCopy(copy, child.row, child.sequence_id, context.session.session_id, pinned[::-1])
    child.copies.add(copy.op_id)
    context.copies.append(copy)
