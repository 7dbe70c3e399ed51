"""Admission: the longest hit, then everything the first chunk needs, or nothing at all."""

from dataclasses import dataclass

import numpy as np

from kvplane.cache.core import tokens as token_ops
from kvplane.cache.core.arrays import I64, NO_I64
from kvplane.cache.core.requests import Admit, Step
from kvplane.cache.core.results import Admission, HitReason, Reason, SequenceState
from kvplane.cache.core.sequences import Sequence, Status
from kvplane.cache.core.state import PoolState, StepContext

_RECENT_TICKS = 64
"""A refused sequence holds others back only while its engine goes on asking for it."""


@dataclass(frozen=True, slots=True)
class _Hit:
    blocks: I64
    """Table entries that hit, nulls before `first_real`."""
    first_real: int
    reason: HitReason


class Admissions:
    """The admissions of one step, in the engine's order, within its limits."""

    def __init__(self, state: PoolState, context: StepContext, step: Step) -> None:
        self._state = state
        self._context = context
        self._count = step.max_admissions
        self._tokens = step.max_admitted_tokens

    def ask(self, admit: Admit) -> None:
        """Admit a sequence, or say why it waits. A refused one stays known and keeps its place by age."""
        state = self._state
        row = self._context.session.first_row + (admit.sequence_id & 0xFFFF_FFFF)
        if state.rows.ids[row] != admit.sequence_id:
            self._introduce(admit, row)
        sequence = state.rows.record(row)
        refusal = self._attempt(sequence, admit)
        sequence.asked_tick = state.tick
        sequence.waiting_reason = refusal
        if refusal == Reason.NONE:
            state.refused.pop(sequence.sequence_id, None)
            return
        if refusal == Reason.NO_SPACE and sequence.sequence_id not in state.refused:
            sequence.refused_at = state.admissions
            state.refused[sequence.sequence_id] = sequence
        waits = state.rows.status[row] == Status.WAITING
        self._context.changed(
            sequence.sequence_id, SequenceState.WAITING if waits else SequenceState.PREEMPTED, refusal
        )
        state.rows.told_step[row] = self._context.step_id

    def _introduce(self, admit: Admit, row: int) -> None:
        state = self._state
        state.arrivals += 1
        ranked = admit.arrival_rank is not None
        sequence = Sequence(
            sequence_id=admit.sequence_id,
            session_id=self._context.session.session_id,
            row=row,
            namespace_id=admit.namespace_id,
            read_cache=admit.read_cache,
            write_cache=admit.write_cache,
            max_hit_tokens=admit.max_hit_tokens,
            extra_keys=admit.extra_keys,
            priority=admit.priority,
            arrival=state.arrivals if admit.arrival_rank is None else admit.arrival_rank,
            ranked=ranked,
            chain=admit.chain or state.namespaces.chain(admit.namespace_id),
            tokens=admit.tokens,
        )
        state.rows.open(sequence, Status.WAITING, self._context.step_id)

    def _attempt(self, sequence: Sequence, admit: Admit) -> Reason:
        state = self._state
        if not state.ready:
            return Reason.POOL_NOT_READY
        if self._context.session.deferred.awaits(sequence.sequence_id):
            return Reason.NOT_DRAINED
        caching = state.config.prefix_caching and (sequence.read_cache or sequence.write_cache)
        if caching:
            # Also when the limits refuse it: a refused sequence is known and hashed.
            token_ops.rechain(state, sequence.row, sequence.tokens)
        if self._count == 0 or self._tokens == 0:
            return Reason.STEP_LIMIT
        if self._context.preemptions:
            return Reason.PREEMPTED_THIS_STEP
        if self._behind_aged(sequence):
            return Reason.BEHIND_AGED
        hit = self._lookup(sequence)
        if hit is None:
            return Reason.PREFIX_PENDING
        return self._allocate(sequence, hit, admit, caching and sequence.write_cache)

    def _behind_aged(self, sequence: Sequence) -> bool:
        state = self._state
        for other in state.refused.values():
            if other is sequence or state.admissions - (other.refused_at or 0) <= state.config.max_bypasses:
                return False
            if other.asked_tick >= state.tick - _RECENT_TICKS:
                return True
        return False

    def _lookup(self, sequence: Sequence) -> _Hit | None:
        """The longest hit; None when the next block is being written elsewhere."""
        state, chain = self._state, sequence.chain
        num_tokens, size = len(sequence.tokens) // 4, state.config.block_tokens
        reason, cap = HitReason.FULL, num_tokens - 1
        if sequence.max_hit_tokens is not None and sequence.max_hit_tokens < cap:
            reason, cap = HitReason.CAPPED, sequence.max_hit_tokens
        limit = cap // size
        nothing = NO_I64
        if not state.config.prefix_caching:
            return _Hit(nothing, 0, HitReason.CACHING_OFF)
        if not sequence.read_cache:
            return _Hit(nothing, 0, HitReason.READ_OFF)
        if limit == 0:
            return _Hit(nothing, 0, HitReason.TOO_SHORT if reason == HitReason.FULL else reason)
        index, first_real = state.pool.index, 0
        if state.rules.prefix_closed:
            count = index.longest_prefix(chain.blob, limit)
            blocks = index.find_all(chain.array(count)) if count else nothing
        else:
            blocks = index.find_all(chain.array(limit))
            count, first_real = state.rules.longest_hit(blocks != 0)
            blocks = blocks[:count]
            blocks[:first_real] = 0
        if count == limit:
            return _Hit(blocks, first_real, reason)
        missing = chain.digest(count)
        writer = state.writers.get(missing)
        if writer is not None:
            waited = self._context.now - state.rows.record(writer).progress_seconds
            if waited <= state.config.writer_patience_seconds:
                return None
            return _Hit(blocks, first_real, HitReason.WRITER_TOO_SLOW)
        evicted = index.was_evicted(missing)
        state.pool.policy.missed(chain.digests(count, limit), evicted)
        return _Hit(blocks, first_real, HitReason.EVICTED if evicted else HitReason.NEVER_SEEN)

    def _allocate(self, sequence: Sequence, hit: _Hit, admit: Admit, writes: bool) -> Reason:
        state, pool, size = self._state, self._state.pool, self._state.config.block_tokens
        num_tokens, hit_blocks = len(sequence.tokens) // 4, len(hit.blocks)
        cached = hit_blocks * size
        slots = max(admit.num_slots or num_tokens, cached + 1)
        slots = min(slots, (hit_blocks + state.config.max_new_blocks_per_sequence) * size)
        if self._tokens is not None:
            slots = min(slots, cached + self._tokens)
        if admit.max_chunk_tokens is not None:
            slots = min(slots, cached + admit.max_chunk_tokens)
        total_blocks = -(-max(slots, num_tokens) // size)
        need = state.rules.prompt_blocks(hit_blocks, hit.first_real, total_blocks)
        chunk_blocks = -(-slots // size) - hit_blocks
        real_hits = hit.blocks[hit.first_real :]
        idle_hits = len(real_hits) - int(np.count_nonzero(state.columns.references[real_hits]))
        usable = pool.available - idle_hits - state.reserved
        margin = state.config.watermark_blocks if state.running else 0
        if max(need, chunk_blocks) + margin > usable:
            return Reason.NO_SPACE
        pool.hold(real_hits)
        table = np.concatenate([hit.blocks, pool.take(chunk_blocks)])
        self._run(sequence, table, hit, slots, writes)
        if state.rules.prefix_closed:
            state.reserve(sequence.row, total_blocks)
        return Reason.NONE

    def _run(self, sequence: Sequence, table: I64, hit: _Hit, slots: int, writes: bool) -> None:
        state, columns, row = self._state, self._state.rows, sequence.row
        tokens = np.frombuffer(sequence.tokens, np.uint32)
        cached = len(hit.blocks) * state.config.block_tokens
        resumed = columns.status[row] == Status.PREEMPTED
        columns.start(row, table, tokens, cached, hit.first_real, writes)
        columns.told_step[row] = self._context.step_id
        columns.hashed[row] = len(sequence.chain)
        columns.set_tail(row, sequence.chain.digest(len(sequence.chain) - 1))
        sequence.tokens = b""
        sequence.progress_seconds = self._context.now
        self._context.session.layout += 1
        state.running += 1
        state.admissions += 1
        if writes:
            state.set_frontier(sequence, len(hit.blocks))
        if not resumed and sequence.read_cache:
            state.query_tokens += len(tokens)
            state.hit_tokens += cached
        if self._count is not None:
            self._count -= 1
        if self._tokens is not None:
            self._tokens -= slots - cached
        self._context.put(state, row, 0)
        self._context.admissions.append(Admission(sequence.sequence_id, cached, slots, hit.reason, bool(resumed)))
