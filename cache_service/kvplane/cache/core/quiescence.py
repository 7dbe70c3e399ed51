"""Quiescence: a released block is nobody else's before its session can no longer touch it (I9)."""

from collections import deque
from collections.abc import Iterator

from kvplane.cache.core.arrays import I64
from kvplane.cache.core.blocks import BlockPool


class DeferredReleases:
    """What one session has released while its device may still work on it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_step: deque[tuple[int, I64]] = deque()
        self._by_sequence: dict[int, I64] = {}
        self.completed_step = 0

    @property
    def coming(self) -> int:
        """References that will be dropped when the session gets on: an upper bound of blocks coming soon."""
        by_step = sum(len(ids) for _, ids in self._by_step)
        return by_step + sum(len(ids) for ids in self._by_sequence.values())

    def release(self, block_ids: I64, last_step: int) -> None:
        """Drop references (tail first) once `last_step`, the last one to name the blocks, has completed."""
        if not len(block_ids):
            return
        if last_step <= self.completed_step:
            self._pool.release(block_ids)
            return
        self._pool.defer(block_ids)
        self._by_step.append((last_step, block_ids))

    def release_when_drained(self, sequence_id: int, block_ids: I64) -> None:
        """Drop the references of a revoked sequence once the session has said that nothing runs on it."""
        self._pool.defer(block_ids)
        self._by_sequence[sequence_id] = block_ids

    def complete(self, step: int) -> None:
        """All work up to `step` has completed on every rank."""
        self.completed_step = step
        while self._by_step and self._by_step[0][0] <= step:
            self._pool.release_deferred(self._by_step.popleft()[1])

    def awaits(self, sequence_id: int) -> bool:
        """Whether the sequence was revoked and its session has not said that it is drained."""
        return sequence_id in self._by_sequence

    def drained(self, sequence_id: int) -> None:
        """Nothing runs on a revoked sequence's blocks any more."""
        self._pool.release_deferred(self._by_sequence.pop(sequence_id))

    def drain(self) -> None:
        """The session is gone from every shard: drop all."""
        while self._by_step:
            self._pool.release_deferred(self._by_step.popleft()[1])
        for sequence_id in list(self._by_sequence):
            self.drained(sequence_id)

    def references(self) -> Iterator[I64]:
        """All deferred references, for `check_integrity`."""
        yield from (ids for _, ids in self._by_step)
        yield from self._by_sequence.values()
