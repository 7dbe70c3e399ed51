"""`check_integrity`: the invariants proved from scratch, from tables, queues and pins (I1, I4, I9)."""

from collections import Counter

import numpy as np

from kvplane.cache.core.sequences import Status
from kvplane.cache.core.state import PoolState
from kvplane.wire.errors import InternalError


def check_integrity(state: PoolState) -> None:
    """Recompute every count and compare. Raises `InternalError` naming the first invariant that is broken."""
    _check_references(state)
    _check_states(state)
    _check_index(state)
    _check_sequences(state)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InternalError(message)


def _check_references(state: PoolState) -> None:
    columns, rows, pool = state.columns, state.rows, state.pool
    references: Counter[int] = Counter()
    deferred: Counter[int] = Counter()
    for row in np.flatnonzero(rows.status == Status.RUNNING).tolist():
        held = rows.held(row).tolist()
        _require(0 not in held and len(set(held)) == len(held), f"I5: table of row {row} is {held}")
        references.update(held)
    for session in state.sessions.values():
        for ids in session.deferred.references():
            deferred.update(ids.tolist())
    references.update(deferred)
    for ids in state.sealing.pinned():
        references.update(ids.tolist())
    for pending in state.copies.values():
        references.update(pending.pinned.tolist())
    references.update(pool.spares.values())
    references.update(pool.retired)
    for block in range(1, pool.num_blocks):
        found, wanted = int(columns.references[block]), references[block]
        _require(found == wanted, f"I1: block {block} counts {found} references and has {wanted}")
        found, wanted = int(columns.deferred[block]), deferred[block]
        _require(found == wanted, f"I9: block {block} counts {found} deferred references and has {wanted}")


def _check_states(state: PoolState) -> None:
    columns, pool = state.columns, state.pool
    idle = columns.references == 0
    idle[0] = False
    quarantined = ~idle & (columns.deferred == columns.references)
    quarantined[0] = False
    cached = np.flatnonzero(idle & columns.indexed)
    free = np.flatnonzero(idle & ~columns.indexed)
    _require(sorted(pool.free_order().tolist()) == free.tolist(), "I1: the free stack is not the free blocks")
    _require(len(pool.policy) == len(cached), "I1: the policy does not hold the cached blocks")
    order = getattr(pool.policy, "order", None)
    if order is not None:
        _require(sorted(order().tolist()) == cached.tolist(), "I1: the policy's order is not the cached blocks")
    _require(int(np.count_nonzero(quarantined)) == pool.quarantined, "I1: quarantined blocks are miscounted")
    held = int(np.count_nonzero(~idle & ~quarantined)) - 1
    _require(held == pool.held, f"I1: {pool.held} blocks count as held, {held} are")
    _require(
        len(free) + len(cached) + held + pool.quarantined == pool.num_blocks - 1,
        "I1: free + cached + held + quarantined is not the pool",
    )


def _check_index(state: PoolState) -> None:
    columns, index = state.columns, state.pool.index
    indexed = np.flatnonzero(columns.indexed)[1:]
    _require(index.find_all(columns.digest[indexed]).tolist() == indexed.tolist(), "I4: the index misses a block")
    _require(len(index) == len(indexed), "I4: the index holds a block that is not published")
    children = Counter(columns.parent[indexed].tolist())
    for block in indexed.tolist():
        parent = int(columns.parent[block])
        _require(int(columns.children[block]) == children[block], f"I4: children of block {block} are miscounted")
        if state.rules.prefix_closed:
            _require(
                bool(columns.indexed[parent]) if columns.depth[block] else parent == 0,
                f"I4: block {block} is published without its parent",
            )
            idle_parent = parent and not columns.references[parent]
            _require(
                not (idle_parent and columns.references[block]),
                f"I4: block {block} is referenced and its parent {parent} can be evicted",
            )
    for spare, canonical in state.pool.spares.items():
        _require(not columns.indexed[spare], f"I4: spare {spare} of {canonical} is indexed")


def _check_sequences(state: PoolState) -> None:
    rows, size = state.rows, state.config.block_tokens
    running = np.flatnonzero(rows.status == Status.RUNNING)
    _require(len(running) == state.running, "running sequences are miscounted")
    _require(bool((rows.committed[running] <= rows.known[running]).all()), "committed beyond the known tokens")
    _require(bool((rows.committed[running] <= rows.cover[running]).all()), "committed beyond the table")
    _require(bool((rows.cover[running] <= rows.room[running]).all()), "table beyond its extent")
    promised = np.maximum(rows.reserved_until[running] - rows.cover[running] // size, 0)
    _require(int(promised.sum()) == state.reserved, "reservations are miscounted")
    for digest, row in state.writers.items():
        sequence = rows.records[row]
        _require(
            sequence is not None
            and sequence.frontier is not None
            and sequence.chain.digest(sequence.frontier) == digest,
            f"row {row} is named as a writer it is not",
        )
