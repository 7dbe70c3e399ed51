"""Who may read and write which slots: I2, enforced on every plan, read and write of a remote session.

Arrays named `ids`, `generations`, `starts`, `ends` are parallel, one entry per block. A refusal is raised before
anything is changed and names the block. Used on the device thread alone.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvplane.compute.pool import Pool
from kvplane.wire import directory
from kvplane.wire.errors import (
    InvalidArgumentError,
    KvplaneError,
    NotGrantedError,
    StaleEpochError,
    StaleGenerationError,
    UnavailableError,
)
from kvplane.wire.packed import U64Array
from kvplane.wire.stamps import COUNTER_BITS

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int64]

# Of the pins' own type: with a Python integer `ufunc.at` takes forty times as long.
_ONE = np.int32(1)

RETRY_SECONDS = 0.01
"""When asking again makes sense while another session's plan still holds a block."""


class Occupancy:
    """Generations, fill levels and owners of a pool's blocks."""

    def __init__(self, pool: Pool) -> None:
        self._rows = pool.directory.blocks
        self._stamps = pool.stamps
        self._header = pool.directory.header
        self._block_tokens = pool.layout.block_tokens
        self._owners = np.zeros(pool.num_blocks, np.uint64)
        """Session that wrote the occupant; 0 after a restart: then sealed blocks alone are readable."""
        self._pins = np.zeros(pool.num_blocks, np.int32)
        """How often open plans name the block."""
        self.changes = 0
        """Counts what may change the answer of a check, stamps excepted: attached processes write those."""

    def check_current(self, ids: Ids, generations: U64Array) -> None:
        """Raises `StaleGenerationError` when a block has a newer occupant."""
        stale = self._stamps[ids] > generations
        if stale.any():
            index = int(stale.argmax())
            raise StaleGenerationError(
                f"block {ids[index]} has a newer occupant: generation {self._stamps[ids[index]]}",
                metadata=_named(ids, generations, index),
            )

    def check_readable(self, ids: Ids, generations: U64Array, ends: Slots, session_id: int) -> None:
        """Whether slots below `ends` may be read: sealed blocks by everybody, others by their writer as far as they are
        filled. Raises `StaleGenerationError`, `InvalidArgumentError` (not filled) or `NotGrantedError` (another's)."""
        self.check_current(ids, generations)
        filled, sealed, own = self._state(ids, generations, session_id)
        readable = np.where(sealed, self._block_tokens, np.where(own, filled, 0))
        bad = readable < ends
        if not bad.any():
            return
        index = int(bad.argmax())
        where = _named(ids, generations, index)
        if filled[index] >= ends[index]:
            raise NotGrantedError(f"block {ids[index]} is another session's and not sealed", metadata=where)
        message = f"block {ids[index]} is filled up to slot {readable[index]}, slots up to {ends[index]} are read"
        raise _invalid("blocks", message, where)

    def check_writable(self, ids: Ids, generations: U64Array, starts: Slots, session_id: int) -> None:
        """Whether slots from `starts` on may be written: the block is not sealed, is filled exactly up to there, and is
        the session's own or about to get its occupant. Raises like `check_readable`, `StaleEpochError` for a new
        occupant that an older control plane gave, and `UnavailableError` while a plan still names the old one."""
        self.check_current(ids, generations)
        filled, sealed, own = self._state(ids, generations, session_id)
        new = self._is_new(ids, generations)
        if sealed.any():
            index = int(sealed.argmax())
            raise _invalid("blocks", f"block {ids[index]} is sealed", _named(ids, generations, index))
        others = ~new & ~own
        if others.any():
            index = int(others.argmax())
            raise NotGrantedError(f"block {ids[index]} is another session's", metadata=_named(ids, generations, index))
        gap = filled != starts
        if gap.any():
            index = int(gap.argmax())
            message = f"block {ids[index]} is filled up to slot {filled[index]}, not up to {starts[index]}"
            raise _invalid("blocks", message, _named(ids, generations, index))
        old = new & ((generations >> np.uint64(COUNTER_BITS)) < self._header["incarnation"][0])
        if old.any():
            index = int(old.argmax())
            raise StaleEpochError(
                f"block {ids[index]} was given by an older control plane and never written",
                metadata=_named(ids, generations, index),
            )

    def pin(self, ids: Ids) -> None:
        """A plan that names these blocks is open."""
        self.changes += 1
        np.add.at(self._pins, ids, _ONE)

    def unpin(self, ids: Ids) -> None:
        """The plan is closed."""
        np.subtract.at(self._pins, ids, _ONE)

    def check_unpinned(self, ids: Ids, generations: U64Array, own: Iterable[Ids]) -> None:
        """Raises `UnavailableError` when a block that is to get a new occupant is in an open plan of another session.
        `own` are the blocks of the session's own open plans: what one session launches runs in order."""
        pins = self._pins[ids]
        pinned = self._is_new(ids, generations) & (pins > 0)
        if not pinned.any():
            return
        for blocks in own:
            order = np.argsort(ids)
            at = np.searchsorted(ids, blocks, sorter=order)
            inside = at < len(ids)
            hits = order[at[inside]]
            np.subtract.at(pins, hits[ids[hits] == blocks[inside]], 1)
        pinned &= pins > 0
        if pinned.any():
            index = int(pinned.argmax())
            raise UnavailableError(
                f"block {ids[index]} is in an open plan under its old generation",
                metadata=_named(ids, generations, index),
                retry_after_seconds=RETRY_SECONDS,
            )

    def occupy(self, ids: Ids, generations: U64Array, session_id: int) -> None:
        """Give blocks their new occupants where they have not got them: stamp first, then the row, then bytes."""
        new = self._is_new(ids, generations)
        if new.any():
            self.changes += 1
            fresh = ids[new]
            self._stamps[fresh] = generations[new]
            directory.occupy(self._rows, fresh, generations[new], 0)
            self._owners[fresh] = session_id

    def fill(self, ids: Ids, ends: Slots) -> None:
        """Raise fill levels: slots below `ends` are written in every layer."""
        self.changes += 1
        self._rows["filled"][ids] = ends

    def cut(self, ids: Ids, generations: U64Array, ends: Slots, session_id: int) -> None:
        """Lower fill levels of the session's own unsealed blocks (rollback); others stay as they are."""
        filled, sealed, own = self._state(ids, generations, session_id)
        lower = own & ~sealed & (filled > ends)
        self.changes += 1
        self._rows["filled"][ids[lower]] = ends[lower]

    def sealed(self, ids: Ids, generations: U64Array) -> npt.NDArray[np.bool_]:
        """Which blocks are sealed with these generations."""
        return self._state(ids, generations, 0)[1]

    def filled(self, ids: Ids, generations: U64Array) -> Slots:
        """Slots filled under these generations."""
        return self._state(ids, generations, 0)[0]

    def _is_new(self, ids: Ids, generations: U64Array) -> npt.NDArray[np.bool_]:
        is_new: npt.NDArray[np.bool_] = (self._stamps[ids] < generations) | (
            self._rows["generation"][ids] != generations
        )
        return is_new

    def _state(
        self, ids: Ids, generations: U64Array, session_id: int
    ) -> tuple[Slots, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Filled slots, whether sealed, whether the session's own; all under the given generations."""
        rows = self._rows
        current = (rows["generation"][ids] == generations) & (self._stamps[ids] == generations)
        filled = np.where(current, rows["filled"][ids], 0).astype(np.int64)
        sealed = current & ((rows["flags"][ids] & directory.SEALED) != 0)
        return filled, sealed, current & (self._owners[ids] == session_id)


def _named(ids: Ids, generations: U64Array, index: int) -> dict[str, str]:
    return {"block_id": str(ids[index]), "generation": str(generations[index])}


def _invalid(field: str, message: str, metadata: dict[str, str]) -> KvplaneError:
    error = InvalidArgumentError.of(field, message)
    error.metadata.update(metadata)
    return error
