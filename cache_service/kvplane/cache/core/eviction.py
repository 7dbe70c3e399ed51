"""Which cached block goes first: the policy's protocol and the default, least recently used.

Mechanism and policy meet in four calls. A policy sees every block that becomes cached or is hit again, reads
class and depth from the columns it was built with, and learns what came back after an eviction from
`missed`; it decides by naming victims.
"""

from typing import Protocol

import numpy as np

from kvplane.cache.core.arrays import I64, Bools
from kvplane.cache.core.columns import BlockColumns
from kvplane.wire.errors import InternalError


class EvictionPolicy(Protocol):
    """Orders the cached blocks of a pool. Deterministic: no clock, no randomness of its own."""

    def __init__(self, columns: BlockColumns) -> None:
        """`columns` are for reading."""
        ...

    def __len__(self) -> int:
        """Cached blocks: every one of them can be evicted in some order."""
        ...

    def cached(self, block_ids: I64) -> None:
        """These published blocks lost their last holder, a chain's tail before its head."""
        ...

    def revived(self, block_ids: I64) -> None:
        """These cached blocks were hit, or left the index otherwise: they are no candidates any more."""
        ...

    def victims(self, count: int) -> I64:
        """Choose and forget `count` cached blocks; together with a block go all its indexed children."""
        ...

    def missed(self, digests: bytes, evicted: bool) -> None:
        """An admission missed these digests (32 bytes each) after its hit; `evicted`: they were here once."""
        ...


class LeastRecentlyUsed:
    """LRU over leaves as a log: append at the tail, hit leaves a hole, evict from the head.

    Holes and compaction cost O(1) amortised per appended block, and every operation is a few array
    instructions for any number of blocks, where a linked list pays per block. A chain is appended tail first
    and a holder of a block holds its ancestors, so the head of the log is nearly always a leaf; one that is
    not (its child was sealed after it had been released) moves to the tail, behind its descendants.
    """

    def __init__(self, columns: BlockColumns) -> None:
        num_blocks = len(columns.parent)
        self._parent = columns.parent
        self._children = columns.children
        self._log: I64 = np.zeros(2 * num_blocks, np.int64)
        self._place: I64 = np.zeros(num_blocks, np.int64)
        self._chosen: Bools = np.zeros(num_blocks, np.bool_)
        self._head = 0
        self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def cached(self, block_ids: I64) -> None:
        """Append as most recently used."""
        count = len(block_ids)
        if self._tail + count > len(self._log):
            self._compact()
        start, self._tail = self._tail, self._tail + count
        self._log[start : self._tail] = block_ids
        self._place[block_ids] = np.arange(start, self._tail, dtype=np.int64)
        self._count += count

    def revived(self, block_ids: I64) -> None:
        """Leave holes where the blocks were."""
        self._log[self._place[block_ids]] = 0
        self._count -= len(block_ids)

    def missed(self, digests: bytes, evicted: bool) -> None:
        """LRU keeps no ghosts."""

    def order(self) -> I64:
        """Cached blocks, least recently used first."""
        log = self._log[self._head : self._tail]
        live: I64 = log[log != 0]
        return live

    def victims(self, count: int) -> I64:
        """The least recently used blocks that are leaves, or become leaves by their children's eviction."""
        if count > self._count:
            raise InternalError(f"{count} victims wanted of {self._count} cached blocks")
        victims = self._oldest(count)
        self._chosen[victims] = True
        with_parent = np.count_nonzero(self._chosen[self._parent[victims]])
        self._chosen[victims] = False
        # Each child's parent is among the victims exactly if the victims' children are all among them.
        if with_parent == int(self._children[victims].sum()):
            self._head = int(self._place[victims[-1]]) + 1
            self._count -= count
            return victims
        return self._leaves(count)

    def _oldest(self, count: int) -> I64:
        width = count
        while True:
            log = self._log[self._head : min(self._head + width, self._tail)]
            live: I64 = log[log != 0]
            if len(live) >= count:
                return live[:count]
            width *= 2

    def _leaves(self, count: int) -> I64:
        lost: dict[int, int] = {}
        victims: list[int] = []
        while len(victims) < count:
            block = int(self._oldest(1)[0])
            self._head = int(self._place[block]) + 1
            self._count -= 1
            if int(self._children[block]) > lost.get(block, 0):
                self.cached(np.array([block], np.int64))
            else:
                parent = int(self._parent[block])
                lost[parent] = lost.get(parent, 0) + 1
                victims.append(block)
        return np.array(victims, np.int64)

    def _compact(self) -> None:
        live = self.order()
        self._log[: len(live)] = live
        self._place[live] = np.arange(len(live), dtype=np.int64)
        self._head, self._tail = 0, len(live)
