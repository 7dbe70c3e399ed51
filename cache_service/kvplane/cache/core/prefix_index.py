"""The prefix index of a cache group: digest -> canonical block.

A hash table with chained buckets in three columns. A digest is uniformly distributed already, so its first
eight bytes are the hash; the whole digest is compared before a block counts as found. A dictionary would
need four times the memory, an object per block, and a pause of a tenth of a second to grow at a million.
"""

import numpy as np

from kvplane.cache.core.arrays import I64, U8, U32, U64, Bools
from kvplane.wire.identity import DIGEST_BYTES

_WORDS = DIGEST_BYTES // 8


class PrefixIndex:
    """Maps digests to blocks. The digests themselves lie in the pool's column, which the index only reads."""

    def __init__(self, digest: U8) -> None:
        num_blocks = len(digest)
        # At most one bucket in four is used, so that nearly every block is the first of its chain.
        buckets = 1 << (4 * num_blocks - 1).bit_length()
        self._mask = buckets - 1
        self._mask64 = np.uint64(buckets - 1)
        self._heads: U32 = np.zeros(buckets, np.uint32)
        self._next: U32 = np.zeros(num_blocks, np.uint32)
        self._prefix: U64 = np.zeros(num_blocks, np.uint64)
        """First eight bytes of an indexed block's digest, side by side for the cache's sake."""
        self._evicted: U64 = np.zeros(1 << (num_blocks - 1).bit_length(), np.uint64)
        self._evicted_mask = np.uint64(len(self._evicted) - 1)
        self._digest = digest
        self._words: U64 = digest.view(np.uint64)
        # Single entries are read and written through memoryviews: three times as fast as array scalars.
        self._flat_bytes = digest.data.cast("B")
        self._flat_words = digest.data.cast("B").cast("Q")
        self._head_at = self._heads.data
        self._next_at = self._next.data

    def __len__(self) -> int:
        """Blocks indexed, counted from scratch: O(pool)."""
        count, blocks = 0, self._heads[self._heads != 0]
        while len(blocks):
            count += len(blocks)
            blocks = self._next[blocks]
            blocks = blocks[blocks != 0]
        return count

    def find(self, digest: bytes) -> int:
        """Canonical block of `digest`, 0 when it is not published."""
        prefix = int.from_bytes(digest[:8], "little")
        block = self._head_at[prefix & self._mask]
        while block:
            if self._flat_words[_WORDS * block] == prefix and self._is(block, digest):
                return int(block)
            block = self._next_at[block]
        return 0

    def find_all(self, digests: U8) -> I64:
        """Canonical block of each row of `digests` [n, 32], 0 where it is not published."""
        wanted: U64 = digests.view(np.uint64)
        blocks = self._heads[self._buckets(wanted[:, 0])].astype(np.int64)
        other = np.flatnonzero((self._prefix[blocks] != wanted[:, 0]) & (blocks != 0))
        while len(other):
            blocks[other] = rest = self._next[blocks[other]].astype(np.int64)
            other = other[(self._prefix[rest] != wanted[other, 0]) & (rest != 0)]
        found = blocks.nonzero()[0]
        if len(found) == len(blocks):
            same = self._words[blocks] == wanted
        else:
            same = self._words[blocks[found]] == wanted[found]
        if not same.all():
            # Eight equal bytes and another digest: somebody searched for it. Look closely.
            for index in found[~same.all(axis=1)].tolist():
                blocks[index] = self.find(digests[index].tobytes())
        return blocks

    def longest_prefix(self, digests: bytes, limit: int) -> int:
        """How many of the first `limit` digests (32 bytes each) are published, given that ancestors are (I4).

        Gallops: probes 1, 2, 4, … until a miss, then halves the gap: 2·log2(hit) probes instead of hit.
        """
        step, low = 1, 0
        while low + step <= limit and self._has(digests, low + step - 1):
            low += step
            step *= 2
        high = min(low + step - 1, limit)
        while low < high:
            middle = (low + high + 1) // 2
            if self._has(digests, middle - 1):
                low = middle
            else:
                high = middle - 1
        return low

    def insert(self, block_ids: I64) -> bool:
        """Index blocks whose digests are in the column; False, and nothing changed, when one is known."""
        prefixes = self._words[block_ids, 0]
        buckets = self._buckets(prefixes)
        first = other = self._heads[buckets]
        while np.count_nonzero(other):
            at = other.astype(np.int64)
            # A block with the same 64 bits is taken for the same digest here: the caller looks closely.
            if np.count_nonzero(self._prefix[at] == prefixes):
                return False
            other = self._next[at]
        self._prefix[block_ids] = prefixes
        self._next[block_ids] = first
        self._heads[buckets] = block_ids
        lost = (self._heads[buckets] != block_ids).nonzero()[0]
        if len(lost):
            return self._insert_behind(block_ids, buckets, lost)
        return True

    def build(self, block_ids: I64) -> Bools:
        """Index many blocks whose digests are not known; False where one repeats another of them."""
        prefixes = self._words[block_ids, 0]
        self._prefix[block_ids] = prefixes
        buckets = self._buckets(prefixes)
        left, at = block_ids, buckets
        while len(left):
            self._next[left] = self._heads[at]
            self._heads[at] = left
            # Of blocks that share a bucket the last one won; the others go on top of it in the next round.
            lost = (self._heads[at] != left).nonzero()[0]
            left, at = left[lost], at[lost]
        upper, lower = block_ids, self._next[block_ids].astype(np.int64)
        while len(at := lower.nonzero()[0]):
            upper, lower = upper[at], lower[at]
            if np.count_nonzero(self._prefix[upper] == self._prefix[lower]):
                kept: Bools = self.find_all(self._digest[block_ids]) == block_ids
                self.remove(block_ids[~kept])
                return kept
            lower = self._next[lower].astype(np.int64)
        return np.ones(len(block_ids), np.bool_)

    def remove(self, block_ids: I64, *, remember: bool = False) -> None:
        """Forget indexed blocks; `remember` keeps a trace of their digests for `was_evicted`."""
        prefixes = self._prefix[block_ids]
        buckets = self._buckets(prefixes)
        first = self._heads[buckets] == block_ids
        at_head = block_ids[first]
        self._heads[buckets[first]] = self._next[at_head]
        if len(at_head) < len(block_ids):
            rest = ~first
            for block, bucket in zip(block_ids[rest].tolist(), buckets[rest].tolist(), strict=True):
                self._unlink(block, bucket)
        if remember:
            self._evicted[(prefixes & self._evicted_mask).astype(np.int64)] = prefixes

    def _buckets(self, prefixes: U64) -> I64:
        return (prefixes & self._mask64).astype(np.int64)

    def _insert_behind(self, block_ids: I64, buckets: I64, lost: I64) -> bool:
        """Of new blocks that share a bucket the last one won: chain the others, unless two are the same."""
        for done, index in enumerate(lost.tolist()):
            block, bucket = int(block_ids[index]), int(buckets[index])
            if self.find(self._bytes(block)):
                self.remove(np.delete(block_ids, lost[done:]))
                return False
            self._next_at[block] = self._head_at[bucket]
            self._head_at[bucket] = block
        return True

    def was_evicted(self, digest: bytes) -> bool:
        """Whether this digest was evicted lately: newer evictions overwrite the traces of older ones."""
        prefix = int.from_bytes(digest[:8], "little")
        return int(self._evicted[prefix & (len(self._evicted) - 1)]) == prefix

    def _unlink(self, block: int, bucket: int) -> None:
        chain = self._next_at
        other = self._head_at[bucket]
        if other == block:
            self._head_at[bucket] = chain[block]
            return
        while chain[other] != block:
            other = chain[other]
        chain[other] = chain[block]

    def _has(self, digests: bytes, index: int) -> bool:
        return self.find(digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]) != 0

    def _bytes(self, block: int) -> bytes:
        return bytes(self._flat_bytes[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)])

    def _is(self, block: int, digest: bytes) -> bool:
        return self._flat_bytes[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)] == digest
