"""A step is checked whole before anything of it is applied (I6).

The check plays the step's operations through on copies of the few columns they change, so that an operation
is judged against what the ones before it will have made of its sequence.
"""

from dataclasses import dataclass, field

import numpy as np

from kvplane.cache.core.arrays import I64, NO_I64, NO_U32, U32
from kvplane.cache.core.forks import check_copy, owner_of_copy
from kvplane.cache.core.requests import Admit, Advance, Finish, Lengths, Observe, Step
from kvplane.cache.core.results import Operation
from kvplane.cache.core.row_checks import RowChecks
from kvplane.cache.core.sequences import ROW_MASK, Status
from kvplane.cache.core.sessions import Session
from kvplane.cache.core.state import PoolState
from kvplane.wire.errors import InvalidArgumentError

_ONE = np.int64(1)


@dataclass(slots=True)
class CheckedStep:
    """A step's operations as rows of the columns; what had to be skipped is left out and listed."""

    observed: tuple[I64, I64, U32] = (NO_I64, NO_I64, NO_U32)
    committed: tuple[I64, I64] = (NO_I64, NO_I64)
    rolled_back: tuple[I64, I64] = (NO_I64, NO_I64)
    forks: list[tuple[int, int]] = field(default_factory=list)
    """(row of the parent, sequence id of the child)"""
    finished: I64 = field(default_factory=NO_I64.copy)
    extended: tuple[I64, I64] = (NO_I64, NO_I64)
    admits: list[Admit] = field(default_factory=list)
    advance: "CheckedAdvance | None" = None
    late: tuple[I64, U32] = (NO_I64, NO_U32)
    """Tokens of `advance` for sequences that were preempted meanwhile: they are known nevertheless."""
    skipped: list[tuple[Operation, list[int]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CheckedAdvance:
    """`advance` as rows, with what the check has found out on the way."""

    rows: I64
    tokens: U32
    known: I64
    """Known tokens before it."""
    tight: I64
    """Indexes of rows whose extents have no room for one more token."""
    committed: I64
    short: I64
    """Rows whose tables are too short, and by how many blocks."""
    counts: I64


class StepCheck(RowChecks):
    """The check of one step. Raises `InvalidArgumentError` naming the field; changes nothing but a memo."""

    def __init__(self, state: PoolState, session: Session, step: Step) -> None:
        super().__init__(state, session, step.last_seen_step)
        self._session = session
        self._step = step
        self._checked = CheckedStep(skipped=self.skipped)

    def run(self) -> CheckedStep:
        """Check all operations in the order in which they apply."""
        step = self._step
        if step.completed_step or step.transfers or step.drained:
            self._check_acks()
        lost = [ack.op_id for ack in step.transfers if not ack.succeeded]
        changing = (step.observe, step.commit, step.rollback, step.finish)
        if lost or step.forks or changing != (None,) * 4:
            self._copy()
        for op_id in lost:
            row = owner_of_copy(self._state, op_id)
            if row is not None:
                self._status[row - self._base] = Status.PREEMPTED
                self._told[row - self._base] = step.step_id
        if step.observe is not None:
            self._check_observe(step.observe)
        if step.advance is not None:
            self._check_advance(step.advance)
        if step.commit is not None:
            self._check_commit(step.commit)
        if step.rollback is not None:
            self._check_rollback(step.rollback)
        if step.forks:
            self._check_forks()
        if step.finish is not None:
            self._check_finish(step.finish)
        if step.extend is not None:
            self._check_extend(step.extend)
        if step.admit:
            self._check_admit()
        return self._checked

    def _check_acks(self) -> None:
        step, session = self._step, self._session
        completed = session.deferred.completed_step
        if not completed <= step.completed_step <= step.last_seen_step and step.completed_step != completed:
            raise InvalidArgumentError.of(
                "completed_step", f"must be between {completed} and last_seen_step {step.last_seen_step}"
            )
        seen: set[int] = set()
        for index, ack in enumerate(step.transfers):
            check_copy(self._state, session.session_id, ack.op_id, f"transfers[{index}].op_id")
            if ack.op_id in seen:
                raise InvalidArgumentError.of(f"transfers[{index}].op_id", "is named twice")
            seen.add(ack.op_id)
        for index, sequence_id in enumerate(step.drained):
            if not session.deferred.awaits(sequence_id) or sequence_id in step.drained[:index]:
                raise InvalidArgumentError.of(f"drained[{index}]", f"sequence {sequence_id} was not revoked")

    def _check_observe(self, operation: Observe) -> None:
        rows = self._rows(operation.sequence_ids, "observe.sequence_ids")
        self._same_length("observe.counts", operation.counts, rows)
        counts = operation.counts.astype(np.int64)
        if len(counts) and int(counts.min()) < 1:
            raise InvalidArgumentError.of(f"observe.counts[{int(counts.argmin())}]", "must be at least 1")
        if int(counts.sum()) != len(operation.tokens):
            raise InvalidArgumentError.of(
                "observe.tokens", f"has {len(operation.tokens)} tokens for counts of {int(counts.sum())}"
            )
        known = self._known[rows] + counts
        self._at_most(known, self._state.config.max_sequence_tokens, "observe.counts")
        self._known[rows] = known
        self._checked.observed = (rows + self._base, counts, operation.tokens)

    def _check_advance(self, operation: Advance) -> None:
        session, field_name = self._session, "advance.sequence_ids"
        packed = operation.sequence_ids.tobytes()
        tokens, committed = operation.tokens, operation.num_committed.astype(np.int64)
        num_slots = operation.num_slots.astype(np.int64)
        if session.decode_layout == session.layout and session.decode_ids == packed:
            rows = session.decode_rows
        else:
            rows = self._rows(operation.sequence_ids, field_name)
            if len(rows) == np.count_nonzero(self._status[rows] == Status.RUNNING):
                session.decode_layout, session.decode_ids, session.decode_rows = session.layout, packed, rows
                session.decode_absolute = rows + self._first_row
        if not len(tokens) == len(committed) == len(num_slots) == len(rows):
            for name in ("tokens", "num_committed", "num_slots"):
                self._same_length(f"advance.{name}", getattr(operation, name), rows)
        if rows is not session.decode_rows:
            kept = self._running(rows, field_name, Operation.ADVANCE)
            if kept is not None:
                late = np.ones(len(rows), np.bool_)
                late[kept] = False
                self._at_most(self._known[rows[late]] + 1, self._state.config.max_sequence_tokens, field_name)
                self._checked.late = (rows[late] + self._base, tokens[late])
                rows, tokens, committed, num_slots = (
                    rows[kept],
                    tokens[kept],
                    committed[kept],
                    num_slots[kept],
                )
        known, cover = self._known[rows], self._cover[rows]
        was_committed = self._committed[rows]
        bad = (committed > np.minimum(known, cover)) | (committed < was_committed)
        if np.count_nonzero(bad):
            # The token observed here may be committed here as well, which the quick test does not allow for.
            self._between(committed, was_committed, np.minimum(known + _ONE, cover), "advance.num_committed")
        absolute = session.decode_absolute if rows is session.decode_rows else rows + self._first_row
        tight = (known >= self._state.rows.room[absolute]).nonzero()[0]
        if len(tight):
            self._at_most(known + _ONE, self._state.config.max_sequence_tokens, "advance.tokens")
        short = (num_slots > cover).nonzero()[0]
        counts = self._blocks_short(num_slots, cover, short, "advance.num_slots")
        self._checked.advance = CheckedAdvance(absolute, tokens, known, tight, committed, absolute[short], counts)
        if self._copied:
            self._known[rows], self._committed[rows] = known + _ONE, committed

    def _check_commit(self, operation: Lengths) -> None:
        rows, lengths = self._lengths(operation, "commit", Operation.COMMIT)
        limit = np.minimum(self._known[rows], self._cover[rows])
        self._between(lengths, self._committed[rows], limit, "commit.num_tokens")
        self._committed[rows] = lengths
        self._checked.committed = (rows + self._base, lengths)

    def _check_rollback(self, operation: Lengths) -> None:
        rows, lengths = self._lengths(operation, "rollback", Operation.ROLLBACK)
        self._between(lengths, self._committed[rows], self._known[rows], "rollback.num_tokens")
        self._known[rows] = lengths
        self._checked.rolled_back = (rows + self._base, lengths)

    def _check_forks(self) -> None:
        for index, operation in enumerate(self._step.forks):
            field_name = f"forks[{index}].parent_id"
            parent = self._row(operation.parent_id, field_name)
            if self._status[parent] != Status.RUNNING:
                if self._told[parent] <= self._step.last_seen_step:
                    raise InvalidArgumentError.of(field_name, "does not run")
                self.skipped.append((Operation.FORK, [operation.parent_id]))
            for place, child_id in enumerate(operation.child_ids):
                child = self._free_row(child_id, f"forks[{index}].child_ids[{place}]")
                self._ids[child], self._status[child] = child_id, self._status[parent]
                self._known[child], self._committed[child] = self._known[parent], self._committed[parent]
                # Whether the child could run is not known before the answer to this step is.
                self._told[child] = self._step.step_id
                self._checked.forks.append((parent + self._base, child_id))

    def _check_finish(self, operation: Finish) -> None:
        rows = self._rows(operation.sequence_ids, "finish.sequence_ids")
        self._same_length("finish.reasons", operation.reasons, rows)
        self._not_advanced(rows, "finish.sequence_ids")
        self._ids[rows], self._status[rows] = 0, Status.FREE
        self._checked.finished = rows + self._base

    def _check_extend(self, operation: Lengths) -> None:
        rows, num_slots = self._lengths(operation, "extend", Operation.EXTEND)
        cover = self._cover[rows]
        self._blocks_short(num_slots, cover, (num_slots > cover).nonzero()[0], "extend.num_slots")
        self._checked.extended = (rows + self._base, num_slots)

    def _check_admit(self) -> None:
        named: set[int] = set()
        for index, admit in enumerate(self._step.admit):
            field_name = f"admit[{index}]"
            if admit.sequence_id in named:
                raise InvalidArgumentError.of(f"{field_name}.sequence_id", "is named twice")
            named.add(admit.sequence_id)
            row = admit.sequence_id & ROW_MASK
            if not admit.tokens:
                self._row(admit.sequence_id, f"{field_name}.sequence_id")
                if self._status[row] == Status.RUNNING:
                    if self._told[row] <= self._step.last_seen_step:
                        raise InvalidArgumentError.of(f"{field_name}.sequence_id", "runs already")
                    self.skipped.append((Operation.ADMIT, [admit.sequence_id]))
                    continue
            else:
                self._free_row(admit.sequence_id, f"{field_name}.sequence_id")
                self._check_prompt(admit, field_name)
            if not 0 <= admit.num_slots <= self._state.config.max_sequence_tokens:
                raise InvalidArgumentError.of(f"{field_name}.num_slots", "is longer than a sequence may be")
            self._checked.admits.append(admit)

    def _check_prompt(self, admit: Admit, field_name: str) -> None:
        state, config = self._state, self._state.config
        num_tokens, odd = divmod(len(admit.tokens), 4)
        if odd:
            raise InvalidArgumentError.of(f"{field_name}.tokens", "must be packed u32: a multiple of 4 bytes")
        if num_tokens > config.max_sequence_tokens:
            raise InvalidArgumentError.of(f"{field_name}.tokens", f"more than {config.max_sequence_tokens}")
        blocks = state.rules.prompt_blocks(0, 0, -(-num_tokens // config.block_tokens))
        usable = config.num_blocks - 1 - len(state.pool.retired)
        if blocks > usable:
            raise InvalidArgumentError.of(
                f"{field_name}.tokens", f"need {blocks} blocks and can never fit a pool of {usable}"
            )
        root = state.namespaces.root(admit.namespace_id, f"{field_name}.namespace_id")
        if admit.max_hit_tokens is not None and admit.max_hit_tokens < 0:
            raise InvalidArgumentError.of(f"{field_name}.max_hit_tokens", "must not be negative")
        if admit.chain is not None and (
            admit.chain.root == root and len(admit.chain) > num_tokens // config.block_tokens
        ):
            raise InvalidArgumentError.of(f"{field_name}.chain", "is longer than the prompt")
        if admit.arrival_rank is not None and not 0 <= admit.arrival_rank < 1 << 63:
            raise InvalidArgumentError.of(f"{field_name}.arrival_rank", "must be below 2^63")
        whole = -(-num_tokens // config.block_tokens)
        for block, keys in admit.extra_keys.items():
            if not 0 <= block < whole or any(not 0x20 <= key.kind <= 0x2F for key in keys):
                raise InvalidArgumentError.of(f"{field_name}.extra_keys[{block}]", "has no such block or kind")

    def _lengths(self, operation: Lengths, name: str, kind: Operation) -> tuple[I64, I64]:
        rows = self._rows(operation.sequence_ids, f"{name}.sequence_ids")
        self._same_length(f"{name}.num_tokens", operation.num_tokens, rows)
        self._not_advanced(rows, f"{name}.sequence_ids")
        lengths = operation.num_tokens.astype(np.int64)
        kept = self._running(rows, f"{name}.sequence_ids", kind)
        return (rows, lengths) if kept is None else (rows[kept], lengths[kept])

    def _not_advanced(self, rows: I64, field_name: str) -> None:
        advance = self._checked.advance
        if advance is not None and len(common := np.intersect1d(rows + self._base, advance.rows)):
            index = int((rows + self._base == common[0]).argmax())
            raise InvalidArgumentError.of(f"{field_name}[{index}]", "is in advance as well")
