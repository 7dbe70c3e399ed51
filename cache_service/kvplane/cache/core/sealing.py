"""Publish after write: seal orders out, acknowledgements in, and only then the index (I3).

A sealed block is pinned from the commit that filled it to the acknowledgement, so its occupant cannot change
under a seal that is under way. A block whose digest is indexed already becomes a spare: it holds a
reference on the canonical block, so that a cached block never has a held descendant (I4).
"""

from dataclasses import dataclass

import numpy as np

from kvplane.cache.core.arrays import I64, U32, U64, Bools
from kvplane.cache.core.blocks import BlockPool
from kvplane.cache.core.chains import Namespaces
from kvplane.cache.core.sequences import Sequence
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.identity import DIGEST_BYTES

_ONE = np.uint32(1)
_MOST_ACKNOWLEDGED = 256
"""Blocks that may be acknowledged and not indexed: bounds what a single step has to catch up on."""


@dataclass(frozen=True, slots=True)
class SealBatch:
    """Blocks that all shards are to mark as sealed, parents before children; parallel arrays."""

    seal_id: int
    group: int
    block_ids: U32
    generations: U64
    digests: bytes
    """32 bytes a block."""
    parent_digests: bytes
    depths: U32
    """Index of the block in its chain."""
    namespace_ids: U32


@dataclass(slots=True)
class _Filled:
    """Blocks that one commit filled, or several put together, in chain order per sequence."""

    block_ids: I64
    generations: U64
    previous: I64
    """Predecessor of each in its table, 0 at the root."""
    previous_generations: U64
    digests: bytes
    parent_digests: bytes
    depths: U32
    namespace_ids: U32
    prompts: tuple[tuple[Sequence, int], ...]
    """Sequences whose prompts these are, and the index after the last block of each."""
    resets: int

    def plus(self, others: "list[_Filled]") -> "_Filled":
        """These and others as one."""
        parts = [self, *others]
        return _Filled(
            np.concatenate([part.block_ids for part in parts]),
            np.concatenate([part.generations for part in parts]),
            np.concatenate([part.previous for part in parts]),
            np.concatenate([part.previous_generations for part in parts]),
            b"".join([part.digests for part in parts]),
            b"".join([part.parent_digests for part in parts]),
            np.concatenate([part.depths for part in parts]),
            np.concatenate([part.namespace_ids for part in parts]),
            tuple(prompt for part in parts for prompt in part.prompts),
            self.resets,
        )


class Sealing:
    """Collects filled blocks, hands them out in batches, publishes what is acknowledged."""

    def __init__(self, pool: BlockPool, namespaces: Namespaces, prefix_closed: bool) -> None:
        self.resets = 0
        """Rises with every reset: a batch that is older must look at every parent again."""
        self._pool = pool
        self._namespaces = namespaces
        self._prefix_closed = prefix_closed
        self._filled: list[_Filled] = []
        self._under_way: dict[int, _Filled] = {}
        self._acknowledged: list[_Filled] = []
        self._acknowledged_blocks = 0
        self._last_id = 0

    def __len__(self) -> int:
        """Blocks filled and not handed out yet."""
        return sum(len(part.block_ids) for part in self._filled)

    def fill(
        self,
        block_ids: I64,
        previous: I64,
        digests: bytes,
        parent_digests: bytes,
        depths: U32,
        namespace_ids: U32,
        prompts: tuple[tuple[Sequence, int], ...] = (),
    ) -> None:
        """Full, committed blocks: pinned now, sealed with the next batch.

        `previous` is each one's predecessor in its table, 0 at the root.
        """
        columns = self._pool.columns
        # The writer's table holds them, so a pin can neither revive nor leave quarantine.
        columns.references[block_ids] += _ONE
        generation = columns.generation
        self._filled.append(
            _Filled(
                block_ids,
                generation[block_ids],
                previous,
                generation[previous],
                digests,
                parent_digests,
                depths,
                namespace_ids,
                prompts,
                self.resets,
            )
        )

    def take(self) -> SealBatch | None:
        """All filled blocks as one batch; None when there are none."""
        if not self._filled:
            return None
        filled, *others = self._filled
        self._filled = []
        if others:
            filled = filled.plus(others)
        self._last_id += 1
        self._under_way[self._last_id] = filled
        return SealBatch(
            self._last_id,
            0,
            filled.block_ids.astype(np.uint32),
            filled.generations,
            filled.digests,
            filled.parent_digests,
            filled.depths,
            filled.namespace_ids,
        )

    def acknowledge(self, seal_id: int, sealed: Bools | None = None) -> tuple[tuple[Sequence, int], ...]:
        """All shards have sealed a batch (`sealed[i]` says which blocks; None: all): publish and unpin them.

        Returns the prompts that got further, each with the index after its last published block. Raises
        `InvalidArgumentError` for a batch that is not under way.
        """
        batch = self._under_way.get(seal_id)
        if batch is None:
            raise InvalidArgumentError.of("seal_id", f"batch {seal_id} is not under way")
        if sealed is not None and len(sealed) != len(batch.block_ids):
            raise InvalidArgumentError.of("sealed", f"has {len(sealed)} entries for {len(batch.block_ids)} blocks")
        del self._under_way[seal_id]
        if sealed is None and self._nobody_waits(batch):
            self._acknowledged.append(batch)
            self._acknowledged_blocks += len(batch.block_ids)
            if self._acknowledged_blocks >= _MOST_ACKNOWLEDGED:
                self.settle()
            return batch.prompts
        self.settle()
        self._index(batch, sealed)
        return batch.prompts

    def settle(self) -> None:
        """Index what is acknowledged: needed before anybody looks a prefix up, stops or runs short.

        Steady decode does none of that, so the work of many steps is done at once.
        """
        if not self._acknowledged:
            return
        batch, *others = self._acknowledged
        self._acknowledged, self._acknowledged_blocks = [], 0
        self._index(batch.plus(others) if others else batch, None)

    def pinned(self) -> list[I64]:
        """Blocks pinned by sealing, once per pin."""
        parts = (*self._filled, *self._under_way.values(), *self._acknowledged)
        return [part.block_ids for part in parts]

    def _nobody_waits(self, batch: _Filled) -> bool:
        """Whether a running sequence holds each block, so that it makes no difference when it is unpinned."""
        columns, ids = self._pool.columns, batch.block_ids
        alone = columns.references[ids] - columns.deferred[ids] == _ONE
        return batch.resets == self.resets and not np.count_nonzero(alone)

    def _index(self, batch: _Filled, sealed: Bools | None) -> None:
        if sealed is not None or not self._publish(batch):
            one_by_one = range(len(batch.block_ids)) if sealed is None else np.flatnonzero(sealed).tolist()
            for index in one_by_one:
                self._publish_one(batch, index)
        self._pool.release(batch.block_ids[::-1])

    def _publish(self, batch: _Filled) -> bool:
        """Publish a batch whose parents and digests hold no surprise; False, and nothing done, otherwise."""
        ids, previous, columns = batch.block_ids, batch.previous, self._pool.columns
        if batch.resets != self.resets:
            return False
        indexed = columns.indexed
        indexed[ids] = True
        if self._prefix_closed:
            # An indexed predecessor with the same occupant as at the commit is the canonical parent.
            same = columns.generation[previous] == batch.previous_generations
            if np.count_nonzero(same & indexed[previous]) < len(ids):
                indexed[ids] = False
                return False
        columns.digest[ids] = np.frombuffer(batch.digests, np.uint8).reshape(-1, DIGEST_BYTES)
        if not self._pool.index.insert(ids):
            indexed[ids] = False
            return False
        columns.depth[ids] = batch.depths
        columns.namespace[ids] = batch.namespace_ids
        if self._prefix_closed:
            columns.parent[ids] = previous
            np.add.at(columns.children, previous, _ONE)
        else:
            columns.parent[ids] = 0
            columns.children[0] += np.uint32(len(ids))
        return True

    def _publish_one(self, batch: _Filled, index: int) -> None:
        pool, columns = self._pool, self._pool.columns
        part = slice(DIGEST_BYTES * index, DIGEST_BYTES * (index + 1))
        digest, parent_digest = batch.digests[part], batch.parent_digests[part]
        block, depth = int(batch.block_ids[index]), int(batch.depths[index])
        namespace, parent = int(batch.namespace_ids[index]), 0
        if self._prefix_closed:
            if depth == 0:
                rooted = parent_digest == self._namespaces.root(namespace)
            else:
                parent = pool.index.find(parent_digest)
                rooted = parent != 0 and self._holds_parent(batch, index, parent)
            if not rooted:
                return
        elif batch.resets != self.resets:
            return
        canonical = pool.index.find(digest)
        if canonical:
            pool.spares[block] = canonical
            pool.hold(np.array([canonical]))
            return
        columns.digest[block] = np.frombuffer(digest, np.uint8)
        columns.depth[block], columns.namespace[block] = depth, namespace
        columns.parent[block] = parent
        columns.children[parent] += _ONE
        columns.indexed[block] = True
        pool.index.build(np.array([block]))

    def _holds_parent(self, batch: _Filled, index: int, parent: int) -> bool:
        """Whether nobody can hold the block without holding its canonical parent, itself or through a spare.

        Not so when the predecessor in the table failed to be published and another sequence's copy was: that
        one could be evicted under a held child.
        """
        previous = int(batch.previous[index])
        if self._pool.columns.generation[previous] != batch.previous_generations[index]:
            return True  # the table is gone, and the block is held by its seal alone
        return parent in (previous, self._pool.spares.get(previous))
