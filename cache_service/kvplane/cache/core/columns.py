"""The columns of the block pool: one row per block instead of an object per block."""

import numpy as np

from kvplane.cache.core.arrays import I64, U8, U32, U64, Bools
from kvplane.wire.identity import DIGEST_BYTES


class BlockColumns:
    """One row per block; read-only to everything outside the pool, sealing and integrity."""

    __slots__ = (
        "children", "deferred", "depth", "digest", "generation", "indexed", "namespace", "parent",
        "references",
    )  # fmt: skip

    def __init__(self, num_blocks: int, incarnation: int) -> None:
        self.references: U32 = np.zeros(num_blocks, np.uint32)
        """Tables that name the block, plus deferred references, plus operations that pin it."""
        self.deferred: U32 = np.zeros(num_blocks, np.uint32)
        self.generation: U64 = np.full(num_blocks, incarnation << 32, np.uint64)
        self.generation[0] = 0
        self.indexed: Bools = np.zeros(num_blocks, np.bool_)
        """The canonical block of its digest: it can be hit. The null block stands for every root."""
        self.indexed[0] = True
        self.digest: U8 = np.zeros((num_blocks, DIGEST_BYTES), np.uint8)
        """Valid where `indexed`."""
        self.parent: I64 = np.zeros(num_blocks, np.int64)
        """Canonical block of the parent digest; 0 at the root of a chain. Valid where `indexed`."""
        self.children: U32 = np.zeros(num_blocks, np.uint32)
        """Indexed blocks whose parent this is (I4: only a block without children is a victim)."""
        self.depth: U32 = np.zeros(num_blocks, np.uint32)
        self.namespace: U32 = np.zeros(num_blocks, np.uint32)
