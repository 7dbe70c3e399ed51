"""Where tokens and tables of running sequences lie: power-of-two extents of two parallel arrays.

One extent of `n` entries has room for `n` table entries and `n` blocks of tokens, so a sequence's row needs
a single base and a decode step reaches any table entry or token by one computed index.
"""

import numpy as np

from kvplane.cache.core.arrays import U32

_SMALLEST = 4


class Extents:
    """Allocates extents; both arrays move when they grow, so no view of them may be kept."""

    def __init__(self, block_tokens: int, entries: int) -> None:
        self._block_tokens = block_tokens
        self._unused = 0
        self._returned: dict[int, list[int]] = {}
        # Pages of a fresh array cost memory only once they are written.
        self.tables: U32 = np.zeros(max(entries, _SMALLEST), np.uint32)
        self._use(np.zeros(len(self.tables) * block_tokens, np.uint32))

    def allocate(self, entries: int) -> tuple[int, int]:
        """(base, capacity) of an extent of at least `entries` entries."""
        capacity = max(_SMALLEST, 1 << (entries - 1).bit_length())
        returned = self._returned.get(capacity)
        if returned:
            return returned.pop(), capacity
        base, self._unused = self._unused, self._unused + capacity
        if self._unused > len(self.tables):
            size = max(2 * len(self.tables), self._unused)
            self.tables = self._grown(self.tables, size)
            self._use(self._grown(self.tokens, size * self._block_tokens))
        return base, capacity

    def free(self, base: int, capacity: int) -> None:
        """Give an extent back."""
        if capacity:
            self._returned.setdefault(capacity, []).append(base)

    def move(self, base: int, capacity: int, entries: int) -> tuple[int, int]:
        """A larger extent with the same content; the old one is given back."""
        new_base, new_capacity = self.allocate(entries)
        size = self._block_tokens
        self.tables[new_base : new_base + capacity] = self.tables[base : base + capacity]
        self.tokens[new_base * size : (new_base + capacity) * size] = self.tokens[
            base * size : (base + capacity) * size
        ]
        self.free(base, capacity)
        return new_base, new_capacity

    def _use(self, tokens: U32) -> None:
        self.tokens = tokens
        self.token_blocks: U32 = tokens.reshape(-1, self._block_tokens)

    @staticmethod
    def _grown(old: U32, size: int) -> U32:
        new: U32 = np.zeros(size, np.uint32)
        new[: len(old)] = old
        return new
