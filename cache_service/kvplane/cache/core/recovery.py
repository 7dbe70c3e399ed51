"""After a restart of the control plane: which blocks survived on the shards, until all engines have declared theirs.

Nothing is given away meanwhile, so what the shards said of a block at the beginning holds until the end.
"""

from dataclasses import dataclass, field

import numpy as np

from kvplane.cache.core.arrays import I64, NO_I64, U8, U32, U64, Bools
from kvplane.cache.core.sequences import NEVER
from kvplane.cache.core.sessions import Session
from kvplane.cache.core.state import PoolState
from kvplane.wire.identity import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Survivors:
    """What the shards of a pool say of its blocks, a row each."""

    sealed: Bools
    """Sealed on every shard, identically, by the block's newest occupant; what follows `stamped` is valid there."""
    stamped: U64
    """Newest generation that is stamped on every shard."""
    newest: U64
    """Newest generation that is stamped on any shard."""
    digests: U8
    parent_digests: U8
    depths: U32
    namespace_ids: U32


@dataclass(slots=True)
class Recovery:
    """A pool's recovery under way: what survived, and who has claimed what."""

    survivors: Survivors
    claimant: I64 = field(init=False)
    """Session that has claimed an unsealed block; 0: none."""
    full: Bools = field(init=False)
    """The claim was for a block full of committed tokens, with the digest beside it: forks share it."""
    digest: U8 = field(init=False)
    filled: Bools = field(init=False)
    """On its way to be sealed."""

    def __post_init__(self) -> None:
        count = len(self.survivors.sealed)
        self.claimant = np.zeros(count, np.int64)
        self.full, self.filled = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self.digest = np.zeros((count, DIGEST_BYTES), np.uint8)


def survive(state: PoolState, survivors: Survivors) -> int:
    """Index the sealed blocks whose namespace's current version leads to them; returns how many are cached now."""
    spaces = state.namespaces
    roots = np.frombuffer(b"".join(spaces.root(each) for each in range(len(spaces))), np.uint8)
    roots = roots.reshape(-1, DIGEST_BYTES)
    ids = np.flatnonzero(survivors.sealed & (survivors.namespace_ids < len(spaces)))
    first = survivors.depths[ids] == 0
    rooted = (survivors.parent_digests[ids] == roots[survivors.namespace_ids[ids]]).all(axis=1)
    ids = ids[~first | rooted]
    state.recovery = Recovery(survivors)
    return state.pool.restore(
        ids,
        survivors.stamped[ids],
        survivors.digests[ids],
        np.ascontiguousarray(survivors.parent_digests[ids]),
        survivors.depths[ids],
        survivors.namespace_ids[ids],
        state.rules.prefix_closed,
    )


def defer_held(state: PoolState, session: Session, block_ids: I64) -> None:
    """Keep the blocks of an ended session's hold maps until it has drained: it may be running on them."""
    ids = with_ancestors(state, np.unique(block_ids[(block_ids > 0) & (block_ids < state.pool.num_blocks)]))
    pins = pin(state, [ids])
    state.pool.hold(ids)
    session.deferred.release(ids, NEVER)
    state.pool.release(pins)


def conclude(state: PoolState, newest: U64) -> int:
    """End the recovery. Blocks that somebody has stamped since it began (`newest`, shape [num_blocks]) cannot be hit
    any more, nor can their descendants; returns how many those are."""
    state.recovery = None
    columns = state.columns
    bad = columns.indexed & (newest > columns.generation)
    bad[0] = False
    fresh = np.flatnonzero(bad)
    if not len(fresh):
        return 0
    while len(fresh):
        marked = np.zeros(len(bad), np.bool_)
        marked[fresh] = True
        fresh = np.flatnonzero(columns.indexed & marked[columns.parent] & ~bad)
        bad[fresh] = True
    ids = np.flatnonzero(bad)
    state.sealing.resets += 1
    state.pool.unindex(ids)
    return len(ids)


def with_ancestors(state: PoolState, ids: I64) -> I64:
    """Blocks and the indexed ancestors of those that are indexed, tails first: who holds a block holds them (I4)."""
    columns = state.columns
    found = np.zeros(state.pool.num_blocks, np.bool_)
    while len(ids):
        found[ids] = True
        ids = np.unique(columns.parent[ids[columns.indexed[ids]]])
        ids = ids[~found[ids] & (ids != 0)]
    found[0] = False
    all_ids = np.flatnonzero(found)
    depths = np.where(columns.indexed[all_ids], columns.depth[all_ids].astype(np.int64) + 1, 0)
    order = np.argsort(-depths, kind="stable")
    return all_ids[order]


def pin(state: PoolState, parts: list[I64]) -> I64:
    """Take the free blocks among these out of the free ones, under the generations that they have on the shards."""
    ids = np.unique(np.concatenate([NO_I64, *parts]))
    columns = state.columns
    free: I64 = ids[(columns.references[ids] == 0) & ~columns.indexed[ids]]
    if len(free) and state.recovery is not None:
        state.pool.claim(free, state.recovery.survivors.newest[free])
    return free
