"""What the checks of a step share: known, running and new rows, and errors that name the field."""

import numpy as np

from kvplane.cache.core.arrays import I64, NO_I64, U8, U32, U64
from kvplane.cache.core.results import Operation
from kvplane.cache.core.sequences import ROW_MASK, Status
from kvplane.cache.core.sessions import Session
from kvplane.cache.core.state import PoolState
from kvplane.wire.errors import InvalidArgumentError

_ROW_MASK = np.uint64(ROW_MASK)
_ONE = np.int64(1)


class RowChecks:
    """Columns of one session's rows, for looking up and judging the sequences that a step names.

    Methods that name sequences raise `InvalidArgumentError` with the path of the bad entry.
    """

    def __init__(self, state: PoolState, session: Session, last_seen_step: int) -> None:
        self._state = state
        self._last_seen_step = last_seen_step
        self._base = session.first_row
        self._first_row = np.int64(session.first_row)
        self.skipped: list[tuple[Operation, list[int]]] = []
        """Operations on sequences whose change of state the sender could not know."""
        self._taken: set[int] = set()
        """Rows that new sequences of this step occupy."""
        self._copied = False
        window = slice(self._base, self._base + session.max_sequences)
        rows = state.rows
        self._ids: U64 = rows.ids[window]
        self._status: U8 = rows.status[window]
        self._known: I64 = rows.known[window]
        self._committed: I64 = rows.committed[window]
        self._told: I64 = rows.told_step[window]
        self._scratch: I64 = rows.scratch[window]
        self._cover: I64 = rows.cover[window]

    def _copy(self) -> None:
        """Let the checks change the columns: on copies."""
        self._copied = True
        self._ids, self._status = self._ids.copy(), self._status.copy()
        self._known, self._committed = self._known.copy(), self._committed.copy()
        self._told = self._told.copy()

    def _rows(self, sequence_ids: U64, field_name: str) -> I64:
        """Rows (in the session's window) of known sequences, each named once."""
        rows = (sequence_ids & _ROW_MASK).astype(np.int64)
        if len(rows) and int(rows.max()) >= len(self._ids):
            index = int((rows >= len(self._ids)).argmax())
            raise InvalidArgumentError.of(
                f"{field_name}[{index}]", f"row {int(rows[index])} is not below {len(self._ids)}"
            )
        unknown = (self._ids[rows] != sequence_ids) | (sequence_ids == 0)
        if np.count_nonzero(unknown):
            index = int(unknown.argmax())
            raise InvalidArgumentError.of(
                f"{field_name}[{index}]", f"sequence {int(sequence_ids[index])} is unknown or finished"
            )
        order = np.arange(len(rows))
        self._scratch[rows] = order
        repeated = self._scratch[rows] != order
        if np.count_nonzero(repeated):
            index = int(self._scratch[rows[repeated.argmax()]])
            raise InvalidArgumentError.of(f"{field_name}[{index}]", "is named twice")
        return rows

    def _row(self, sequence_id: int, field_name: str) -> int:
        """Row (in the session's window) of one known sequence."""
        row = sequence_id & ROW_MASK
        if not 0 < sequence_id < 1 << 64 or row >= len(self._ids) or int(self._ids[row]) != sequence_id:
            raise InvalidArgumentError.of(field_name, f"sequence {sequence_id} is unknown or finished")
        return row

    def _running(self, rows: I64, field_name: str, operation: Operation) -> I64 | None:
        """Indexes of running rows, None for all; the others are skipped if the sender could not know."""
        idle = np.flatnonzero(self._status[rows] != Status.RUNNING)
        if not len(idle):
            return None
        known = self._told[rows[idle]] <= self._last_seen_step
        if np.count_nonzero(known):
            raise InvalidArgumentError.of(f"{field_name}[{int(idle[known.argmax()])}]", "does not run")
        self.skipped.append((operation, self._ids[rows[idle]].tolist()))
        return np.setdiff1d(np.arange(len(rows)), idle, assume_unique=True)

    def _free_row(self, sequence_id: int, field_name: str) -> int:
        row, serial = sequence_id & ROW_MASK, sequence_id >> 32
        if not 0 < sequence_id < 1 << 64 or row >= len(self._ids):
            raise InvalidArgumentError.of(field_name, f"row {row} is not below {len(self._ids)}")
        if self._ids[row] or row in self._taken:
            raise InvalidArgumentError.of(field_name, f"row {row} belongs to another sequence")
        if serial <= int(self._state.rows.serial[row + self._base]):
            raise InvalidArgumentError.of(field_name, f"serial {serial} was used before in row {row}")
        self._taken.add(row)
        return row

    def _blocks_short(self, num_slots: I64, cover: I64, short: I64, field_name: str) -> I64:
        """How many blocks each row with index in `short` lacks to cover its slots."""
        if not len(short):
            return NO_I64
        config, wanted = self._state.config, num_slots[short]
        counts = (wanted - cover[short] + self._state.block_size - _ONE) // self._state.block_size
        if wanted.max() > config.max_sequence_tokens:
            self._at_most(num_slots, config.max_sequence_tokens, field_name)
        if counts.max() > config.max_new_blocks_per_sequence:
            most = config.max_new_blocks_per_sequence * config.block_tokens
            self._between(num_slots, np.zeros_like(cover), cover + most, field_name)
        return counts

    @staticmethod
    def _same_length(field_name: str, values: U32, rows: I64) -> None:
        if len(values) != len(rows):
            raise InvalidArgumentError.of(field_name, f"has {len(values)} entries for {len(rows)} sequences")

    @staticmethod
    def _at_most(values: I64, limit: int, field_name: str) -> None:
        over = values > limit
        if np.count_nonzero(over):
            raise InvalidArgumentError.of(f"{field_name}[{int(over.argmax())}]", f"leads beyond {limit}")

    @staticmethod
    def _between(values: I64, low: I64, high: I64, field_name: str) -> None:
        bad = (values < low) | (values > high)
        if np.count_nonzero(bad):
            at = int(bad.argmax())
            raise InvalidArgumentError.of(
                f"{field_name}[{at}]",
                f"is {int(values[at])}, must be between {int(low[at])} and {int(high[at])}",
            )
