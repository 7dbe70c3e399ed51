"""Block tables of a remote session, as its grants made them. Tables are values: a change makes a new one."""

from dataclasses import dataclass

import numpy as np

from kvplane.wire.errors import InvalidArgumentError, NotGrantedError
from kvplane.wire.packed import U32Array, U64Array

ROW_MASK = 0xFFFF_FFFF
"""The low half of a sequence id: its row in the session."""

_NO_IDS = np.zeros(0, np.uint32)
_NO_GENERATIONS = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Blocks of one sequence, in order; id 0 where a block left the window."""

    block_ids: U32Array
    generations: U64Array

    def cut(self, entries: int) -> "Table":
        """The first entries."""
        return Table(self.block_ids[:entries], self.generations[:entries])

    def put(self, start: int, block_ids: U32Array, generations: U64Array) -> "Table":
        """Entries from `start` on, replacing what was there. The caller has checked that `start` leaves no gap."""
        end = start + len(block_ids)
        if start == len(self.block_ids):
            return Table(np.concatenate((self.block_ids, block_ids)), np.concatenate((self.generations, generations)))
        return Table(
            np.concatenate((self.block_ids[:start], block_ids, self.block_ids[end:])),
            np.concatenate((self.generations[:start], generations, self.generations[end:])),
        )


EMPTY = Table(_NO_IDS, _NO_GENERATIONS)


class StagedTables:
    """Changes to a session's tables that take effect all together, or not at all."""

    def __init__(self, tables: dict[int, Table], *, reset: bool) -> None:
        self._tables = tables
        self._reset = reset
        self._changed: dict[int, Table | None] = {}

    def get(self, sequence_id: int) -> Table:
        """The table as the changes so far have made it. Raises `NotGrantedError`."""
        table = self._find(sequence_id)
        if table is None:
            raise not_granted(sequence_id)
        return table

    def truncate(self, sequence_id: int, entries: int) -> Table:
        """Cut a table and return what it was before. Raises `InvalidArgumentError` when it is shorter."""
        table = self.get(sequence_id)
        if entries > len(table.block_ids):
            raise InvalidArgumentError.of(
                "truncated_tokens", f"sequence {sequence_id} has {len(table.block_ids)} entries, not {entries}"
            )
        self._changed[sequence_id] = table.cut(entries)
        return table

    def fork(self, child: int, parent: int, entries: int) -> None:
        """Start a table with entries of another."""
        table = self.get(parent)
        if entries > len(table.block_ids):
            raise InvalidArgumentError.of(
                "fork_tokens", f"sequence {parent} has {len(table.block_ids)} entries, not {entries}"
            )
        self._changed[child] = table.cut(entries)

    def release(self, sequence_id: int) -> None:
        """Drop a table; one that is not there is dropped already."""
        self._changed[sequence_id] = None

    def put(self, sequence_id: int, start: int, block_ids: U32Array, generations: U64Array) -> None:
        """Set entries from `start` on. Raises `InvalidArgumentError` for a gap."""
        table = self._find(sequence_id) or EMPTY
        if start > len(table.block_ids):
            raise InvalidArgumentError.of(
                "table_deltas.starts", f"sequence {sequence_id} has {len(table.block_ids)} entries, not {start}"
            )
        self._changed[sequence_id] = table.put(start, block_ids, generations)

    def commit(self) -> None:
        """Let the changes take effect."""
        if self._reset:
            self._tables.clear()
        for sequence_id, table in self._changed.items():
            if table is None:
                self._tables.pop(sequence_id, None)
            else:
                self._tables[sequence_id] = table

    def _find(self, sequence_id: int) -> Table | None:
        if sequence_id in self._changed:
            return self._changed[sequence_id]
        return None if self._reset else self._tables.get(sequence_id)


def not_granted(sequence_id: int) -> NotGrantedError:
    """The refusal of a sequence without a table."""
    return NotGrantedError(f"sequence {sequence_id} has no granted table", metadata={"sequence_id": str(sequence_id)})
