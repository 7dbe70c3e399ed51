"""The block pool: who holds which block, as columns instead of an object per block.

A block is `free` (on the free stack), `cached` (indexed, no reference: the eviction policy holds it), `held`
or `quarantined` (all its references are deferred). Block 0 is the null block: its row is never counted.
"""

import numpy as np

from kvplane.cache.core.arrays import I64, NO_I64, U8, U32, U64
from kvplane.cache.core.columns import BlockColumns
from kvplane.cache.core.eviction import EvictionPolicy
from kvplane.cache.core.prefix_index import PrefixIndex

_ONE = np.uint32(1)
_NEXT = np.uint64(1)


class BlockPool:
    """Takes, holds, releases and evicts blocks; all arrays of ids are duplicate-free within a call."""

    def __init__(self, columns: BlockColumns, index: PrefixIndex, policy: EvictionPolicy, incarnation: int) -> None:
        self.columns = columns
        self.index = index
        self.policy = policy
        self.num_blocks = len(columns.references)
        self.quarantined = 0
        self.evicted_blocks = 0
        self.retired: set[int] = set()
        """Blocks whose generations are used up: pinned for good."""
        self.spares: dict[int, int] = {}
        """Held duplicate -> canonical block of its digest, on which it holds a reference."""
        self._first_generation = np.uint64((incarnation << 32) + 1)
        self._last_generation = np.uint64((incarnation << 32) + 0xFFFF_FFFF)
        self._restored = False
        self._stack: I64 = np.arange(self.num_blocks - 1, -1, -1)
        self._top = self.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks without content."""
        return self._top

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones, then cached ones by eviction."""
        return self._top + len(self.policy)

    @property
    def held(self) -> int:
        """Blocks that somebody may read or write now."""
        return self.num_blocks - 1 - self._top - len(self.policy) - self.quarantined

    def free_order(self) -> I64:
        """Free blocks in the order in which they will be taken."""
        return self._stack[: self._top][::-1].copy()

    def take(self, count: int) -> I64:
        """`count` blocks with one reference and a new generation each; the caller has checked `available`."""
        if count == 0:
            return NO_I64
        rest = max(self._top - count, 0)
        ids = self._stack[rest : self._top][::-1]
        self._top = rest
        ids = ids.copy() if len(ids) == count else np.concatenate([ids, self._evict(count - len(ids))])
        generation = self.columns.generation
        newest = generation[ids] + _NEXT
        if self._restored:
            # A restored block keeps an older incarnation's generation until its next occupant.
            newest = np.maximum(newest, self._first_generation)
        generation[ids] = newest
        self.columns.references[ids] = 1
        return ids

    def hold(self, ids: I64) -> None:
        """Add a reference to each block: a hit, a fork, a pin."""
        columns = self.columns
        references = columns.references[ids]
        if np.count_nonzero(references) < len(ids):
            self.policy.revived(ids[references == 0])
        columns.references[ids] = references + _ONE
        if self.quarantined:
            self.quarantined -= int(np.count_nonzero((columns.deferred[ids] == references) & (references > 0)))

    def release(self, ids: I64) -> None:
        """Drop a reference of each block, a chain's tail first: what nobody holds becomes cached or free."""
        columns = self.columns
        references = columns.references[ids] - _ONE
        columns.references[ids] = references
        if np.count_nonzero(references) < len(ids):
            self._unreferenced(ids[references == 0])
        if np.count_nonzero(columns.deferred[ids]):
            self.quarantined += int(np.count_nonzero((columns.deferred[ids] == references) & (references > 0)))

    def defer(self, ids: I64) -> None:
        """Turn a reference of each block into a deferred one (I9)."""
        columns = self.columns
        columns.deferred[ids] += _ONE
        self.quarantined += int(np.count_nonzero(columns.deferred[ids] == columns.references[ids]))

    def release_deferred(self, ids: I64) -> None:
        """Drop a deferred reference of each block: its session can no longer touch it."""
        columns = self.columns
        columns.deferred[ids] -= _ONE
        references = columns.references[ids] - _ONE
        columns.references[ids] = references
        gone = references == 0
        self.quarantined -= int(np.count_nonzero(gone))
        self._unreferenced(ids[gone])

    def unindex(self, ids: I64) -> None:
        """Take indexed blocks out of the index; those without a holder become free.

        The caller names whole subtrees, so that no indexed block loses its parent.
        """
        columns = self.columns
        np.subtract.at(columns.children, columns.parent[ids], _ONE)
        self.index.remove(ids)
        columns.indexed[ids] = False
        cached = ids[columns.references[ids] == 0]
        self.policy.revived(cached)
        self._push(cached)

    def restore(
        self,
        block_ids: I64,
        generations: U64,
        digests: U8,
        parent_digests: U8,
        depths: U32,
        namespace_ids: U32,
        prefix_closed: bool,
    ) -> int:
        """Make blocks of a pool that nobody has taken from cached; see `CacheCore.restore`."""
        columns, index = self.columns, self.index
        self._restored = True
        columns.generation[block_ids] = generations
        columns.digest[block_ids] = digests
        columns.depth[block_ids] = depths
        columns.namespace[block_ids] = namespace_ids
        kept = index.build(block_ids)
        parents = np.zeros(len(block_ids), np.int64)
        if prefix_closed:
            inner = depths > 0
            while True:
                parents = index.find_all(parent_digests) * inner
                orphans = kept & inner & (parents == 0)
                if not np.count_nonzero(orphans):
                    break
                index.remove(block_ids[orphans])
                kept &= ~orphans
        if not kept.all():
            block_ids, parents, depths = block_ids[kept], parents[kept], depths[kept]
        columns.parent[block_ids] = parents
        columns.children += np.bincount(parents, minlength=self.num_blocks).astype(np.uint32)
        columns.indexed[block_ids] = True
        # Deepest first, so that every chain's tail goes before its head; equal depths keep their order.
        tail_first = np.argsort(~np.minimum(depths, 0xFFFF).astype(np.uint16), kind="stable")
        self.policy.cached(block_ids[tail_first])
        free = self._stack[: self._top]
        free = free[~columns.indexed[free]]
        self._stack[: len(free)] = free
        self._top = len(free)
        return len(block_ids)

    def claim(self, ids: I64, generations: U64) -> None:
        """Take free blocks out of the free ones with the occupants that they have, a reference each."""
        self._restored = True
        self.columns.generation[ids] = generations
        self.columns.references[ids] = 1
        free = self._stack[: self._top]
        free = free[self.columns.references[free] == 0]
        self._stack[: len(free)] = free
        self._top = len(free)

    def _evict(self, count: int) -> I64:
        victims = self.policy.victims(count)
        columns = self.columns
        np.subtract.at(columns.children, columns.parent[victims], _ONE)
        self.index.remove(victims, remember=True)
        columns.indexed[victims] = False
        self.evicted_blocks += count
        return victims

    def _unreferenced(self, ids: I64) -> None:
        spent = self.columns.generation[ids] == self._last_generation
        if np.count_nonzero(spent):
            self.columns.references[ids[spent]] = 1
            self.retired.update(ids[spent].tolist())
            ids = ids[~spent]
        indexed = self.columns.indexed[ids]
        kept = np.count_nonzero(indexed)
        if kept == len(ids):
            self.policy.cached(ids)
            return
        if kept:
            self.policy.cached(ids[indexed])
            ids = ids[~indexed]
        self._push(ids)
        if self.spares:
            canonical = [self.spares.pop(block) for block in ids.tolist() if block in self.spares]
            for block in canonical:
                self.release(np.array([block]))

    def _push(self, ids: I64) -> None:
        self._stack[self._top : self._top + len(ids)] = ids[::-1]
        self._top += len(ids)
