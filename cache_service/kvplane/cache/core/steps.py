"""Apply a checked step, operation by operation, in the order of the contract."""

import numpy as np

from kvplane.cache.core import forks, growth
from kvplane.cache.core import tokens as token_ops
from kvplane.cache.core.admission import Admissions
from kvplane.cache.core.arrays import I64
from kvplane.cache.core.requests import Step
from kvplane.cache.core.results import Reason, SequenceState, StepResult
from kvplane.cache.core.sequences import Status
from kvplane.cache.core.sessions import Session
from kvplane.cache.core.state import PoolState, StepContext
from kvplane.cache.core.validation import CheckedAdvance, StepCheck


def apply_step(state: PoolState, session: Session, step: Step, now: float) -> StepResult:
    """Check `step` whole, then apply it whole.

    Raises `InvalidArgumentError` or `NotFoundError`, and has changed nothing then.
    """
    checked = StepCheck(state, session, step).run()
    context = StepContext(session, step.step_id, now)
    state.tick += 1
    if step.admit or step.finish or step.forks or step.rollback or step.transfers or step.drained:
        state.sealing.settle()
    for operation, sequence_ids in checked.skipped:
        context.skip(operation, sequence_ids)

    for ack in step.transfers:
        forks.acknowledge_copy(state, context, ack.op_id, ack.succeeded)
    for sequence_id in step.drained:
        _drained(state, session, sequence_id, step.last_seen_step)
    if step.completed_step > session.deferred.completed_step:
        session.deferred.complete(step.completed_step)

    rows, counts, tokens = checked.observed
    if len(rows):
        token_ops.observe(state, rows, counts, tokens)
    rows, tokens = checked.late
    if len(rows):
        token_ops.observe(state, rows, np.ones_like(rows), tokens)
    advance = checked.advance
    if advance is not None:
        _write_tokens(state, context, advance)
    rows, lengths = checked.committed
    if len(rows):
        token_ops.commit(state, context, rows, lengths)
    if step.rollback is not None:
        token_ops.rollback(state, context, *checked.rolled_back)
    for parent_row, child_id in checked.forks:
        forks.fork(state, context, parent_row, child_id)
    for row in checked.finished.tolist():
        finish(state, context, row)
    if advance is not None and len(advance.short):
        growth.extend(state, context, advance.short, advance.counts)
    rows, num_slots = checked.extended
    if len(rows):
        _extend(state, context, rows, num_slots)
    if checked.admits:
        admissions = Admissions(state, context, step)
        for admit in checked.admits:
            admissions.ask(admit)
    return StepResult(
        step.step_id,
        state.statistics(),
        tuple(context.tables),
        tuple(context.admissions),
        tuple(context.states),
        tuple(context.copies),
        tuple(context.skipped),
        tuple(context.preemptions),
    )


def finish(state: PoolState, context: StepContext, row: int) -> None:
    """End a sequence in any state; its published blocks stay hittable."""
    columns = state.rows
    sequence = columns.record(row)
    if columns.status[row] == Status.RUNNING:
        context.session.deferred.release(growth.stop(state, row), context.last_launched)
    state.refused.pop(sequence.sequence_id, None)
    columns.close(row)
    context.changed(sequence.sequence_id, SequenceState.FINISHED, Reason.FINISHED_BY_CLIENT)


def _write_tokens(state: PoolState, context: StepContext, advance: CheckedAdvance) -> None:
    columns, rows = state.rows, advance.rows
    for index in advance.tight.tolist():
        columns.ensure_room(int(rows[index]), int(advance.known[index]) + 1)
    columns.extents.tokens[columns.token_base[rows] + advance.known] = advance.tokens
    columns.known[rows] = advance.known + np.int64(1)
    token_ops.commit(state, context, rows, advance.committed)


def _extend(state: PoolState, context: StepContext, rows: I64, num_slots: I64) -> None:
    # A child that could not be forked, or one that an earlier sequence's need preempted, has no table.
    missing = num_slots - state.rows.cover[rows]
    short = ((missing > 0) & (state.rows.status[rows] == Status.RUNNING)).nonzero()[0]
    if len(short):
        size = state.block_size
        growth.extend(state, context, rows[short], (missing[short] + size - 1) // size)


def _drained(state: PoolState, session: Session, sequence_id: int, last_seen_step: int) -> None:
    session.deferred.drained(sequence_id)
    row = session.first_row + (sequence_id & 0xFFFF_FFFF)
    if state.rows.ids[row] == sequence_id:
        # The session has seen the revocation: what it sends about the sequence from now on, it means.
        state.rows.told_step[row] = last_seen_step
