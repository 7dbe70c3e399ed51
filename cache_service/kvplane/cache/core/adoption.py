"""What an engine says that it holds, taken over after a restart of the control plane.

A claim is judged block by block; a sequence is cut at its first bad one, and what it loses is deferred like any
release (I9).
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np

from kvplane.cache.core import tokens as token_ops
from kvplane.cache.core.arrays import I64, NO_I64
from kvplane.cache.core.declarations import Declaration, Declared
from kvplane.cache.core.recovery import pin, with_ancestors
from kvplane.cache.core.results import Cut, CutReason
from kvplane.cache.core.sequences import Sequence, Status
from kvplane.cache.core.sessions import Session
from kvplane.cache.core.state import PoolState
from kvplane.wire.identity import DIGEST_BYTES


@dataclass(slots=True)
class _Judged:
    """A declared sequence with a table, and how much of it stays."""

    declared: Declared
    sequence: Sequence
    ids: I64
    """Entries that stay."""
    lost: I64
    """Blocks behind them that the session may still touch."""
    committed: int
    first_real: int


def adopt(state: PoolState, session: Session, declaration: Declaration, now: float) -> tuple[Cut, ...]:
    """Take over what a session holds. The caller has checked the declaration's form (`declarations.check`)."""
    cuts: list[Cut] = []
    tables: list[_Judged] = []
    for declared in declaration.sequences:
        sequence = _introduce(state, session, declared)
        if not declared.runs:
            state.rows.open(sequence, Status.PREEMPTED if declared.preempted else Status.WAITING, 0)
            continue
        judged, cut = _judge(state, session, declared, sequence)
        tables.append(judged)
        if cut is not None:
            cuts.append(cut)
    session.ledger.newest_step = declaration.last_sent_step
    session.deferred.completed_step = declaration.completed_step
    released = _released(state, session, declaration, [each.lost for each in tables])
    pins = pin(state, [each.ids[each.first_real :] for each in tables] + [ids for _, ids in released])
    for judged in tables:
        _run(state, judged, now)
    for step_id, ids in released:
        state.pool.hold(ids)
        session.deferred.release(ids, step_id)
    state.pool.release(pins)
    session.layout += 1
    return tuple(cuts)


def _introduce(state: PoolState, session: Session, declared: Declared) -> Sequence:
    admit = declared.admit
    state.arrivals += 1
    return Sequence(
        sequence_id=admit.sequence_id,
        session_id=session.session_id,
        row=session.first_row + (admit.sequence_id & 0xFFFF_FFFF),
        namespace_id=admit.namespace_id,
        read_cache=admit.read_cache,
        write_cache=admit.write_cache,
        max_hit_tokens=admit.max_hit_tokens,
        extra_keys=admit.extra_keys,
        priority=admit.priority,
        arrival=state.arrivals if admit.arrival_rank is None else admit.arrival_rank,
        ranked=admit.arrival_rank is not None,
        chain=admit.chain or state.namespaces.chain(admit.namespace_id),
        tokens=admit.tokens,
    )


def _judge(state: PoolState, session: Session, declared: Declared, sequence: Sequence) -> tuple[_Judged, Cut | None]:
    size, columns = state.config.block_tokens, state.columns
    ids, generations, committed = declared.block_ids, declared.generations, declared.num_committed
    state.rows.open(sequence, Status.WAITING, 0)
    if state.config.prefix_caching:
        token_ops.rechain(state, sequence.row, sequence.tokens)
    whole, known = committed // size, min(len(sequence.chain), len(ids))
    chain = np.zeros((len(ids), DIGEST_BYTES), np.uint8)
    chain[:known] = sequence.chain.array(known)
    full = np.arange(len(ids)) < min(whole, known if state.config.prefix_caching else whole)

    indexed = columns.indexed[ids] & (columns.generation[ids] == generations)
    same = (columns.digest[ids] == chain).all(axis=1)
    reasons = np.zeros(len(ids), np.uint8)
    recovery = state.recovery
    if recovery is None:
        reasons[~indexed] = CutReason.TOO_LATE
        sealed, lost = indexed, indexed
    else:
        survivors = recovery.survivors
        row = survivors.sealed[ids] & (survivors.stamped[ids] == generations) & ~indexed
        same = np.where(row, (survivors.digests[ids] == chain).all(axis=1), same)
        sealed = indexed | row
        claimed = recovery.claimant[ids] != 0
        shared = (recovery.claimant[ids] == session.session_id) & recovery.full[ids] & full
        claimed &= ~(shared & (recovery.digest[ids] == chain).all(axis=1))
        reasons[claimed] = CutReason.CLAIMED_TWICE
        if declared.granted is not None:
            reasons[~declared.granted] = CutReason.NOT_GRANTED
        reasons[survivors.stamped[ids] < generations] = CutReason.NEVER_WRITTEN
        reasons[survivors.newest[ids] > generations] = CutReason.STALE_GENERATION
        lost = (survivors.newest[ids] == generations) & (sealed | (reasons != CutReason.NOT_GRANTED))
    reasons[sealed] = np.where((same & full)[sealed], 0, CutReason.DIGEST_DIFFERS)
    reasons[ids == 0] = 0

    first_real = int((ids != 0).argmax()) if len(ids) else 0
    bad = reasons.nonzero()[0]
    keep = int(bad[0]) if len(bad) else len(ids)
    committed = min(committed, keep * size)
    if keep <= first_real or state.rules.first_needed(committed) < first_real:
        keep = committed = 0
    cut = None
    if keep < len(ids):
        cut = Cut(sequence.sequence_id, keep * size, CutReason(int(reasons[bad[0]])))
    if recovery is not None:
        mine = np.flatnonzero(~sealed[:keep] & (ids[:keep] != 0))
        recovery.claimant[ids[mine]] = session.session_id
        recovery.full[ids[mine]], recovery.digest[ids[mine]] = full[mine], chain[mine]
    judged = _Judged(
        declared, sequence, ids[:keep], ids[keep:][(lost & (ids != 0))[keep:]], committed, first_real if keep else 0
    )
    return judged, cut


def _released(
    state: PoolState, session: Session, declaration: Declaration, lost: Several[I64]
) -> list[tuple[int, I64]]:
    """Blocks that the session has let go of and may still touch, by the step whose completion frees them, ascending."""
    by_step: dict[int, list[I64]] = {declaration.last_sent_step: list(lost)}
    for step_id, ids, generations in declaration.deferred:
        if state.recovery is not None:
            # Of a block that is not stamped nothing was launched; one with a newer occupant was let go of before.
            ids = ids[state.recovery.survivors.newest[ids] == generations]
            free = ids[(state.recovery.claimant[ids] == 0) & ~state.columns.indexed[ids]]
            state.recovery.claimant[free] = session.session_id
        else:
            ids = ids[state.columns.indexed[ids] & (state.columns.generation[ids] == generations)]
        by_step.setdefault(step_id, []).append(ids)
    released = []
    for step_id in sorted(by_step):
        ids = np.unique(np.concatenate([NO_I64, *by_step[step_id]]))
        if step_id > declaration.completed_step and len(ids):
            released.append((step_id, with_ancestors(state, ids)))
    return released


def _run(state: PoolState, judged: _Judged, now: float) -> None:
    """Let an adopted sequence run on what stays of its table."""
    columns, sequence, ids = state.rows, judged.sequence, judged.ids
    row, size = sequence.row, state.config.block_tokens
    if not len(ids) and len(judged.declared.block_ids):
        columns.status[row] = Status.PREEMPTED
        return
    writes = state.config.prefix_caching and sequence.write_cache
    tokens = np.frombuffer(sequence.tokens, np.uint32)
    columns.start(row, ids, tokens, judged.committed, judged.first_real, writes)
    columns.hashed[row] = len(sequence.chain)
    columns.set_tail(row, sequence.chain.digest(len(sequence.chain) - 1))
    sequence.tokens = b""
    sequence.progress_seconds = now
    state.running += 1
    state.pool.hold(ids[judged.first_real :])
    if state.rules.prefix_closed:
        state.reserve(row, max(-(-judged.declared.num_prompt_tokens // size), len(ids)))
    whole = judged.committed // size
    if state.config.prefix_caching:
        frontier = _publish(state, sequence, ids, judged.first_real, whole, writes)
        if writes:
            state.set_frontier(sequence, frontier)


def _publish(state: PoolState, sequence: Sequence, ids: I64, first_real: int, whole: int, writes: bool) -> int:
    """Have the full blocks sealed that are not indexed; returns the index of the first one that nobody can hit yet."""
    pool, recovery, chain = state.pool, state.recovery, sequence.chain
    missing = np.flatnonzero(~state.columns.indexed[ids[first_real:whole]]) + first_real
    wanted: list[int] = []
    for index in missing.tolist():
        block, canonical = int(ids[index]), pool.index.find(chain.digest(index))
        if canonical:
            if block not in pool.spares:
                pool.spares[block] = canonical
                pool.hold(np.array([canonical]))
        elif writes and recovery is not None and not recovery.filled[block]:
            recovery.filled[block] = True
            wanted.append(index)
    if wanted:
        at = np.array(wanted)
        state.sealing.fill(
            ids[at],
            np.where(at > 0, ids[at - 1], 0),
            b"".join(chain.digest(index) for index in wanted),
            b"".join(chain.digest(index - 1) for index in wanted),
            at.astype(np.uint32),
            np.full(len(at), sequence.namespace_id, np.uint32),
            ((sequence, whole),),
        )
    return wanted[0] if wanted else whole
