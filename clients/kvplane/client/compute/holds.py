"""What this process may still touch, and which occupants it has announced: hold bits, then stamps (design section 8).

Both are updated by what changed. A block's bit is set while some table entry or copy names it, and for as long after as
work that was launched under that name runs; a stamp is written before the first byte of a new occupant.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvplane.client.compute.memory import MappedShard
from kvplane.client.compute.topology import at_shard
from kvplane.client.device_work import TableChanges
from kvplane.wire.errors import InternalError, StaleEpochError, StaleGenerationError
from kvplane.wire.stamps import COUNTER_BITS

I64 = npt.NDArray[np.int64]

_NO_IDS: I64 = np.zeros(0, np.int64)


class Holds:
    """Hold bits and stamps on all shards of a pool."""

    def __init__(self, shards: Sequence[MappedShard]) -> None:
        self._shards = shards
        num_blocks = len(shards[0].stamps)
        self._counts = np.zeros(num_blocks, np.int32)
        """Table entries and copies that name each block, those let go of included until their step has completed."""
        self._bits = np.zeros(8 * len(shards[0].hold_map), np.bool_)
        """The bits as they are in every hold map."""
        self._named = np.zeros(num_blocks, np.uint64)
        """Newest generation that each block was granted with."""
        self._releases: list[tuple[int, I64]] = []
        self._unstamped: list[I64] = []
        """Granted blocks whose stamps were not compared yet."""
        self._unconfirmed = _NO_IDS
        """Blocks whose stamps were written, and the incarnations not read again since."""

    def apply(self, changes: TableChanges, completed_step: int) -> None:
        """Count what was granted and what was let go of, and set and clear bits accordingly."""
        ids = changes.granted_ids
        if len(ids):
            np.add.at(self._counts, ids, 1)
            # Of several occupants of a block the last one counts: numpy assigns in order, and so was granted.
            self._named[ids] = changes.granted_generations
            self._unstamped.append(ids)
        for copy in changes.copies:
            # The service keeps the source for the copy, even when no table names it any more.
            self._counts[copy.source_id] += 1
        touched = [ids, np.array([copy.source_id for copy in changes.copies], np.int64)]
        self._releases += changes.released
        if self._releases:
            touched += self._let_go(completed_step)
        if any(map(len, touched)):
            self._set_bits(np.concatenate(touched))

    def copied(self, source_ids: I64, step: int) -> None:
        """Copies from these blocks were launched; they have completed when `step` has."""
        self._releases.append((step, source_ids))

    def is_current(self, block_id: int, generation: int) -> bool:
        """Whether the newest occupant granted of a block is this one, and is still named."""
        return bool(self._counts[block_id]) and int(self._named[block_id]) == generation

    def stamp(self) -> None:
        """Stamp new occupants on all shards, then read the shards' incarnations once more.

        Raises `StaleGenerationError` when a block has a newer occupant and `StaleEpochError` when a shard follows a
        newer control plane than the one that granted: nothing may be launched then, and the next call compares again.
        """
        if self._unstamped:
            ids = np.unique(np.concatenate(self._unstamped))
            # Who was let go of meanwhile may have a newer occupant, rightly.
            ids = ids[self._counts[ids] > 0]
            named = self._named[ids]
            for shard in self._shards:
                self._check_current(shard, ids, named)
            written = np.zeros(len(ids), np.bool_)
            for shard in self._shards:
                behind = shard.stamps[ids] < named
                shard.stamps[ids[behind]] = named[behind]
                written |= behind
            self._unconfirmed = np.concatenate([self._unconfirmed, ids[written]])
            self._unstamped.clear()
        if len(self._unconfirmed):
            self._confirm()

    def clear(self) -> None:
        """Nothing is launched any more: let go of everything. A shard that was started again has no connection on which
        it could be told, and reads the bits."""
        self._bits[:] = False
        for shard in self._shards:
            shard.hold_map[:] = 0

    def forget(self) -> None:
        """Drop the views into the shards. The bits stay as they are."""
        self._shards = ()

    def _check_current(self, shard: MappedShard, ids: I64, named: npt.NDArray[np.uint64]) -> None:
        newer = shard.stamps[ids] > named
        if newer.any():
            block, generation = int(ids[newer.argmax()]), int(named[newer.argmax()])
            error = StaleGenerationError(
                f"block {block} was granted with generation {generation} and is stamped {shard.stamps[block]}",
                metadata={"block_id": str(block), "generation": str(generation)},
            )
            raise at_shard(error, shard.shard)

    def _confirm(self) -> None:
        ids = self._unconfirmed = self._unconfirmed[self._counts[self._unconfirmed] > 0]
        if not len(ids):
            return
        # The stamps have to be visible before the incarnations are read: a lock is a barrier on every machine.
        with threading.Lock():
            granted_by = int((self._named[ids] >> np.uint64(COUNTER_BITS)).min())
        for shard in self._shards:
            if granted_by < shard.incarnation:
                error = StaleEpochError(
                    f"new blocks were granted by incarnation {granted_by}, the shard follows {shard.incarnation}",
                    metadata={"epoch": "incarnation"},
                )
                raise at_shard(error, shard.shard)
        self._unconfirmed = _NO_IDS

    def _let_go(self, completed_step: int) -> list[I64]:
        due = [ids for step, ids in self._releases if step <= completed_step]
        if due:
            self._releases = [each for each in self._releases if each[0] > completed_step]
            for ids in due:
                np.subtract.at(self._counts, ids, 1)
                if int(self._counts[ids].min(initial=0)) < 0:
                    raise InternalError("a block was let go of more often than it was granted")
        return due

    def _set_bits(self, ids: I64) -> None:
        held = self._counts[ids] > 0
        changed = ids[self._bits[ids] != held]
        if not len(changed):
            return
        self._bits[changed] = self._counts[changed] > 0
        places = changed >> 3
        packed = np.packbits(self._bits.reshape(-1, 8)[places], axis=1, bitorder="little")[:, 0]
        for shard in self._shards:
            shard.hold_map[places] = packed
