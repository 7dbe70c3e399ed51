"""Sequences of a session as columns by row: what the control plane knows of them, as of the last result."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvplane.client.values import SequenceState
from kvplane.v1 import step_pb2, types_pb2
from kvplane.wire.errors import LimitExceededError, NotFoundError
from kvplane.wire.packed import unpack_u32, unpack_u64

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

RUNS = (SequenceState.RUNNING, SequenceState.STALLED)
"""States in which a sequence has a table."""

ROW_MASK = 0xFFFF_FFFF
_FIRST_COLUMNS = 64

Number = TypeVar("Number", np.int32, np.uint32, np.uint64)
Granted = Callable[[I64, U64], None]
Released = Callable[[I64, U64], None]


def row_of(sequence_id: int) -> int:
    """Row of a sequence in the columns."""
    return sequence_id & ROW_MASK


class SequenceTable:
    """Columns of shape [max_sequences], and block tables of shape [max_sequences, columns].

    `blocks` is ready for `kvplane.kernels.plan`: rows of block ids, zeros behind `num_blocks`. A null entry (0) left a
    sliding window. Arrays are replaced when they grow: index them anew, keep no view.
    """

    def __init__(self, max_sequences: int, block_tokens: int, granted: Granted, released: Released) -> None:
        self.block_tokens = block_tokens
        self.ids: U64 = np.zeros(max_sequences, np.uint64)
        """Sequence id; 0 where the row is free."""
        self.state: U8 = np.zeros(max_sequences, np.uint8)
        """`SequenceState`."""
        self.known: I64 = np.zeros(max_sequences, np.int64)
        """Token ids known."""
        self.committed: I64 = np.zeros(max_sequences, np.int64)
        """Tokens whose KV is written."""
        self.num_blocks: I64 = np.zeros(max_sequences, np.int64)
        """Entries of the block table."""
        self.blocks: I32 = np.zeros((max_sequences, _FIRST_COLUMNS), np.int32)
        self.generations: U64 = np.zeros((max_sequences, _FIRST_COLUMNS), np.uint64)
        self.tokens: U32 = np.zeros((max_sequences, _FIRST_COLUMNS * block_tokens), np.uint32)
        self.prompts: dict[int, step_pb2.NewSequence] = {}
        """By row: how the sequence was introduced, without its tokens."""
        self.prompt_tokens: I64 = np.zeros(max_sequences, np.int64)
        self._granted = granted
        self._released = released
        self._serial = 0
        self._free = list(range(max_sequences - 1, -1, -1))

    @property
    def num_slots(self) -> I64:
        """Token slots that each row's table covers, shape [max_sequences]; a new array."""
        return self.num_blocks * self.block_tokens

    def new_id(self) -> int:
        """An id for a new sequence. Raises `LimitExceededError` when every row is taken."""
        if not self._free:
            raise LimitExceededError(
                f"the session has {len(self.ids)} sequences already",
                metadata={"limit": "max_sequences", "value": str(len(self.ids))},
            )
        self._serial += 1
        return self._serial << 32 | self._free.pop()

    def give_back(self, sequence_id: int) -> None:
        """A row whose sequence the service does not know (any more) may be used again."""
        self._free.append(row_of(sequence_id))

    def tokens_of(self, sequence_id: int) -> U32:
        """Known token ids, shape [known]; a copy. Raises `NotFoundError`."""
        row = self.row(sequence_id)
        return self.tokens[row, : self.known[row]].copy()

    def row(self, sequence_id: int) -> int:
        """Row of a known sequence. Raises `NotFoundError`."""
        row = row_of(sequence_id)
        if row >= len(self.ids) or self.ids[row] != sequence_id:
            raise NotFoundError(f"sequence {sequence_id} is not one of this session's")
        return row

    @property
    def rows_in_use(self) -> I64:
        """Rows with a sequence, ascending."""
        return np.flatnonzero(self.ids)

    # What steps do to them

    def introduce(self, message: step_pb2.NewSequence) -> None:
        """A prompt that the service knows now."""
        row = row_of(message.sequence_id)
        tokens = np.frombuffer(message.tokens, "<u4")
        self._open(message.sequence_id, tokens)
        kept = step_pb2.NewSequence()
        kept.CopyFrom(message)
        kept.ClearField("tokens")
        self.prompts[row] = kept
        self.prompt_tokens[row] = len(tokens)

    def fork(self, parent_id: int, child_ids: Sequence[int]) -> None:
        """Children with the parent's tokens and committed length."""
        parent = self.row(parent_id)
        tokens, running = self.tokens_of(parent_id), self.state[parent] in RUNS
        for child_id in child_ids:
            child = row_of(child_id)
            self._open(child_id, tokens)
            self.committed[child] = self.committed[parent] if running else 0
            self.prompts[child] = self.prompts[parent]
            self.prompt_tokens[child] = self.prompt_tokens[parent]

    def append(self, rows: I64, tokens: U32) -> None:
        """One more known token for each row; rows are distinct."""
        known = self.known[rows]
        if len(known):
            self._ensure_tokens(int(known.max()) + 1)
        self.tokens[rows, known] = tokens
        self.known[rows] = known + 1

    def extend_tokens(self, row: int, tokens: U32) -> None:
        """More known tokens for one row."""
        known = int(self.known[row])
        self._ensure_tokens(known + len(tokens))
        self.tokens[row, known : known + len(tokens)] = tokens
        self.known[row] = known + len(tokens)

    def roll_back(self, row: int, num_tokens: int) -> None:
        """Cut a sequence to `num_tokens` known tokens: the entries behind are let go of."""
        self.known[row] = num_tokens
        self.cut_table(row, num_tokens)

    def cut_table(self, row: int, num_tokens: int) -> None:
        """Let go of the entries behind `num_tokens` token slots; nothing behind them is committed any more."""
        keep = -(-num_tokens // self.block_tokens)
        end = int(self.num_blocks[row])
        if keep < end:
            self._let_go(row, keep, end)
            self.num_blocks[row] = keep
        self.committed[row] = min(self.committed[row], num_tokens)

    def admit(self, row: int, cached_tokens: int) -> None:
        """A sequence runs from now on."""
        self.committed[row] = cached_tokens
        self.state[row] = SequenceState.RUNNING

    def change(self, row: int, state: SequenceState) -> None:
        """A sequence's state changed; one that yielded or ended holds nothing any more."""
        self.state[row] = state
        if state in (SequenceState.PREEMPTED, SequenceState.WAITING):
            self.drop_blocks(row)

    def drop_blocks(self, row: int) -> None:
        """Let go of a row's whole table; its tokens stay."""
        self._let_go(row, 0, int(self.num_blocks[row]))
        self.num_blocks[row] = self.committed[row] = 0

    def finish(self, sequence_id: int) -> None:
        """A sequence ended; its row may be used again."""
        row = self.row(sequence_id)
        self.drop_blocks(row)
        self.ids[row] = self.state[row] = self.known[row] = self.prompt_tokens[row] = 0
        self.prompts.pop(row, None)
        self._free.append(row)

    def apply(self, delta: types_pb2.TableDelta) -> None:
        """Write a table delta into the block tables."""
        ids = unpack_u64("table_deltas.sequence_ids", delta.sequence_ids)
        rows = (ids & np.uint64(ROW_MASK)).astype(np.int64)
        starts = unpack_u32("table_deltas.starts", delta.starts, len(rows)).astype(np.int64)
        counts = unpack_u32("table_deltas.counts", delta.counts, len(rows)).astype(np.int64)
        total = int(counts.sum())
        blocks = unpack_u32("table_deltas.block_ids", delta.blocks.block_ids, total).astype(np.int64)
        generations = unpack_u64("table_deltas.generations", delta.blocks.generations, total)
        if not total:
            return
        ends = starts + counts
        self._ensure_columns(int(ends.max()))
        if total == len(rows):
            where = rows, starts
        else:
            within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            where = np.repeat(rows, counts), np.repeat(starts, counts) + within
        replaced, replaced_generations = self.blocks[where], self.generations[where]
        inside = (where[1] < self.num_blocks[where[0]]) & (replaced != 0)
        self.blocks[where] = blocks
        self.generations[where] = generations
        np.maximum.at(self.num_blocks, rows, ends)
        stalled = rows[self.state[rows] == SequenceState.STALLED]
        self.state[stalled] = SequenceState.RUNNING
        real = blocks != 0
        if real.any():
            self._granted(blocks[real], generations[real])
        if inside.any():
            self._released(replaced[inside].astype(np.int64), replaced_generations[inside])

    def _open(self, sequence_id: int, tokens: U32) -> None:
        row = row_of(sequence_id)
        self.ids[row], self.state[row] = sequence_id, SequenceState.WAITING
        self.known[row] = self.committed[row] = self.num_blocks[row] = 0
        self.extend_tokens(row, tokens)

    def _let_go(self, row: int, first: int, end: int) -> None:
        entries = self.blocks[row, first:end]
        real = entries != 0
        held, generations = entries[real].astype(np.int64), self.generations[row, first:end][real]
        self.blocks[row, first:end] = 0
        self.generations[row, first:end] = 0
        if len(held):
            self._released(held, generations)

    def _ensure_columns(self, columns: int) -> None:
        if columns > self.blocks.shape[1]:
            self.blocks = _wider(self.blocks, columns)
            self.generations = _wider(self.generations, columns)

    def _ensure_tokens(self, columns: int) -> None:
        if columns > self.tokens.shape[1]:
            self.tokens = _wider(self.tokens, columns)


def _wider(array: npt.NDArray[Number], columns: int) -> npt.NDArray[Number]:
    """The array with at least so many columns, at least doubled: growth stays amortised. New memory is touched late."""
    wider = np.zeros((array.shape[0], max(columns, 2 * array.shape[1])), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
