"""Cache groups: how layers that share a block table need, skip and hit blocks.

A rule object answers with block indexes only; it knows neither blocks nor sequences. Kinds that are not
built (chunked-local, latent, state) are refused when the pool is configured, never approximated.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvplane.cache.core.arrays import Bools
from kvplane.wire.errors import InvalidArgumentError, UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token attends to all before it."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A token attends to itself and the `window_tokens - 1` before it."""

    window_tokens: int


GroupSpec = FullAttention | SlidingWindow


class GroupRules(Protocol):
    """What the core asks of a cache group; token counts in, block indexes out."""

    prefix_closed: bool
    """A published block's ancestors are published too, so that the longest hit can be found by galloping."""

    def first_needed(self, num_tokens: int) -> int:
        """Index of the first block that a token at position `num_tokens` or later still reads."""
        ...

    def longest_hit(self, present: Bools) -> tuple[int, int]:
        """(blocks hit, index of the first one that must be there), given which blocks are published."""
        ...

    def prompt_blocks(self, hit_blocks: int, first_real: int, total_blocks: int) -> int:
        """Most blocks that a prompt of `total_blocks` holds at once beside the blocks it hits."""
        ...


class FullAttentionRules:
    """Nothing is skipped and nothing expires."""

    prefix_closed = True

    def first_needed(self, num_tokens: int) -> int:  # noqa: ARG002 - the rule's interface
        """Always the first."""
        return 0

    def longest_hit(self, present: Bools) -> tuple[int, int]:
        """All blocks before the first miss."""
        misses = np.flatnonzero(~present)
        return (int(misses[0]) if len(misses) else len(present)), 0

    def prompt_blocks(self, hit_blocks: int, first_real: int, total_blocks: int) -> int:  # noqa: ARG002 - as above
        """All that do not hit."""
        return total_blocks - hit_blocks


class SlidingWindowRules:
    """Blocks before the window are null: neither needed for a hit nor kept while running."""

    prefix_closed = False

    def __init__(self, window_tokens: int, block_tokens: int, max_chunk_blocks: int) -> None:
        self._window_tokens = window_tokens
        self._block_tokens = block_tokens
        self._max_chunk_blocks = max_chunk_blocks
        # The token after a block-aligned hit reads window - 1 tokens, all of them before the boundary.
        self._hit_blocks = -(-(window_tokens - 1) // block_tokens)

    def first_needed(self, num_tokens: int) -> int:
        """The block in which the window of the token at position `num_tokens` begins."""
        return max(0, num_tokens - self._window_tokens + 1) // self._block_tokens

    def longest_hit(self, present: Bools) -> tuple[int, int]:
        """The rightmost run of blocks that fills a window, or a run from the very first block."""
        if self._hit_blocks == 0:
            return len(present), len(present)
        run = 0
        for index in range(len(present) - 1, -1, -1):
            run = run + 1 if present[index] else 0
            if run == self._hit_blocks:
                return index + run, index
        return run, 0

    def prompt_blocks(self, hit_blocks: int, first_real: int, total_blocks: int) -> int:
        """The window and one chunk, at most what the prompt has."""
        cap = self._hit_blocks + 1 + self._max_chunk_blocks
        return max(0, min(total_blocks - hit_blocks, cap - (hit_blocks - first_real)))


def rules_for(spec: object, block_tokens: int, max_chunk_blocks: int) -> GroupRules:
    """Rules of a group. Raises `UnsupportedFeatureError` for a kind that is not built."""
    match spec:
        case FullAttention():
            return FullAttentionRules()
        case SlidingWindow(window_tokens):
            if window_tokens < 1:
                raise InvalidArgumentError.of("group.window_tokens", "must be at least 1")
            return SlidingWindowRules(window_tokens, block_tokens, max_chunk_blocks)
        case _:
            raise UnsupportedFeatureError(
                f"cache group {type(spec).__name__} is not built", metadata={"group": type(spec).__name__}
            )
