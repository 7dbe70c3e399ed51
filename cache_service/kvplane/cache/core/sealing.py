"""Publish after write: seal orders out, acknowledgements in, and only then the index (I3).

A sealed block is pinned from the commit that filled it to the acknowledgement, so its occupant cannot change
under a seal that is under way. A block whose digest is indexed already becomes a spare: it holds a
reference on the canonical block, so that a cached block never has a held descendant (I4).
"""

from dataclasses import dataclass, field

import numpy as np

from kvplane.cache.core.arrays import U32, U64, Bools
from kvplane.cache.core.blocks import BlockPool
from kvplane.cache.core.chains import Namespaces
from kvplane.cache.core.sequences import Sequence
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.identity import DIGEST_BYTES


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


@dataclass(frozen=True, slots=True)
class _Filled:
    """Blocks that one commit filled, in chain order per sequence."""

    block_ids: U32
    previous: U32
    digests: bytes
    parent_digests: bytes
    depths: U32
    namespace_ids: U32
    prompt_of: tuple[Sequence, int] | None
    """The sequence whose prompt these are, and the index after the last of them."""
    resets: int


@dataclass(slots=True)
class _UnderWay:
    batch: SealBatch
    previous: U32
    prompts: list[tuple[Sequence, int]]
    resets: int


@dataclass(slots=True)
class Sealing:
    """Collects filled blocks, hands them out in batches, publishes what is acknowledged."""

    pool: BlockPool
    namespaces: Namespaces
    prefix_closed: bool
    resets: int = 0
    """Rises with every reset: a batch that is older must look at every parent again."""
    _filled: list[_Filled] = field(default_factory=list)
    _under_way: dict[int, _UnderWay] = field(default_factory=dict)
    _last_id: int = 0

    def __len__(self) -> int:
        """Blocks filled and not handed out yet."""
        return sum(len(part.block_ids) for part in self._filled)

    def fill(
        self,
        block_ids: U32,
        previous: U32,
        digests: bytes,
        parent_digests: bytes,
        depths: U32,
        namespace_ids: U32,
        prompt_of: tuple[Sequence, int] | None = None,
    ) -> None:
        """Full, committed blocks: pinned now, sealed with the next batch.

        `previous` is each one's predecessor in its table, 0 at the root.
        """
        # The writer's table holds them, so a pin can neither revive nor leave quarantine.
        self.pool.columns.references[block_ids] += np.uint32(1)
        self._filled.append(
            _Filled(block_ids, previous, digests, parent_digests, depths, namespace_ids, prompt_of, self.resets)
        )

    def take(self) -> SealBatch | None:
        """All filled blocks as one batch; None when there are none."""
        parts, self._filled = self._filled, []
        if not parts:
            return None
        self._last_id += 1
        prompts = [part.prompt_of for part in parts if part.prompt_of is not None]
        if len(parts) == 1:
            part = parts[0]
            ids, previous, depths, spaces = part.block_ids, part.previous, part.depths, part.namespace_ids
            digests, parents = part.digests, part.parent_digests
        else:
            ids = np.concatenate([part.block_ids for part in parts])
            previous = np.concatenate([part.previous for part in parts])
            depths = np.concatenate([part.depths for part in parts])
            spaces = np.concatenate([part.namespace_ids for part in parts])
            digests = b"".join([part.digests for part in parts])
            parents = b"".join([part.parent_digests for part in parts])
        batch = SealBatch(self._last_id, 0, ids, self.pool.columns.generation[ids], digests, parents, depths, spaces)
        self._under_way[self._last_id] = _UnderWay(batch, previous, prompts, parts[0].resets)
        return batch

    def acknowledge(self, seal_id: int, sealed: Bools | None = None) -> list[tuple[Sequence, int]]:
        """Publish the blocks of a batch that all shards have sealed (`sealed[i]`; None: all) and unpin them.

        Returns the prompts that got further, each with the index after its last published block. Raises
        `InvalidArgumentError` for a batch that is not under way.
        """
        under_way = self._under_way.get(seal_id)
        if under_way is None:
            raise InvalidArgumentError.of("seal_id", f"batch {seal_id} is not under way")
        ids = under_way.batch.block_ids
        if sealed is not None and len(sealed) != len(ids):
            raise InvalidArgumentError.of("sealed", f"has {len(sealed)} entries for {len(ids)} blocks")
        del self._under_way[seal_id]
        if sealed is None or bool(sealed.all()):
            self._publish(under_way)
        else:
            for index in np.flatnonzero(sealed).tolist():
                self._publish_one(under_way, index)
        self.pool.release(ids[::-1])
        return under_way.prompts

    def pinned(self) -> list[U32]:
        """Blocks pinned by sealing, once per pin."""
        parts = [part.block_ids for part in self._filled]
        return parts + [under_way.batch.block_ids for under_way in self._under_way.values()]

    def _publish(self, under_way: _UnderWay) -> None:
        batch, previous = under_way.batch, under_way.previous
        ids, columns = batch.block_ids, self.pool.columns
        columns.digest[ids] = np.frombuffer(batch.digests, np.uint8).reshape(-1, DIGEST_BYTES)
        indexed, done = columns.indexed, 0
        if under_way.resets == self.resets:
            # A predecessor in the table is the canonical parent unless it is a spare or unpublished.
            indexed[ids] = True
            if not self.prefix_closed or self._parents_indexed(batch, previous):
                done = self.pool.index.insert(ids)
            indexed[ids[done:]] = False
        if done:
            first = ids[:done]
            columns.depth[first] = batch.depths[:done]
            columns.namespace[first] = batch.namespace_ids[:done]
            if self.prefix_closed:
                columns.parent[first] = previous[:done]
                np.add.at(columns.children, previous[:done], np.uint32(1))
            else:
                columns.parent[first] = 0
                columns.children[0] += np.uint32(done)
        for index in range(done, len(ids)):
            self._publish_one(under_way, index)

    def _parents_indexed(self, batch: SealBatch, previous: U32) -> bool:
        columns = self.pool.columns
        words = np.frombuffer(batch.parent_digests, np.uint64).reshape(-1, DIGEST_BYTES // 8)
        unequal = (columns.digest.view(np.uint64)[previous] != words).any(axis=1)
        return not np.count_nonzero((unequal | ~columns.indexed[previous]) & (batch.depths > 0))

    def _publish_one(self, under_way: _UnderWay, index: int) -> None:
        batch, pool, columns = under_way.batch, self.pool, self.pool.columns
        part = slice(DIGEST_BYTES * index, DIGEST_BYTES * (index + 1))
        digest, parent_digest = batch.digests[part], batch.parent_digests[part]
        block, depth, namespace = (
            int(batch.block_ids[index]), int(batch.depths[index]), int(batch.namespace_ids[index]),
        )  # fmt: skip
        parent = 0
        if self.prefix_closed:
            parent = pool.index.find(parent_digest) if depth else 0
            rooted = parent != 0 if depth else parent_digest == self.namespaces.root(namespace)
            if not rooted:
                return
        elif under_way.resets != self.resets:
            return
        canonical = pool.index.find(digest)
        if canonical:
            pool.spares[block] = canonical
            pool.hold(np.array([canonical], np.uint32))
            return
        columns.digest[block] = np.frombuffer(digest, np.uint8)
        columns.depth[block], columns.namespace[block] = depth, namespace
        columns.parent[block] = parent
        columns.children[parent] += np.uint32(1)
        columns.indexed[block] = True
        pool.index.insert(np.array([block], np.uint32))
