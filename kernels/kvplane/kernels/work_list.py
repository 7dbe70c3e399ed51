"""The work list of a plan: which rows meet which keys in which item, and where partial results go.

Splits of the keys have a fixed length in tokens, counted from position 0, and everything else about an item
depends on its own sequence only. So a sequence gets the same bits alone and in any batch, whatever ids its blocks have.
Backends choose the sizes; the shape of the list is the same on every device.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvplane.kernels.planning import AttentionPlan

UNSPLIT = 1 << 40

# Columns of `WorkList.tokens`
LOW, HIGH, FIRST_PARTIAL, FIRST_SPLIT, SPLITS, POSITION = range(6)


@dataclass(frozen=True, slots=True)
class Splitting:
    """A backend's sizes. Rows are packed: query tokens times query heads of a KV head."""

    narrow_rows: int
    """Sequences of at most so many rows per KV head are served by narrow items of this many rows."""
    wide_rows: int
    """Rows of a wide item."""
    narrow_split: int
    """Keys of a split of a narrow item."""
    wide_split: int
    """Keys of a split of a wide item, for sequences of at most `unsplit_rows` rows."""
    unsplit_rows: int
    """Sequences of more rows have parallelism enough: their keys are not split."""
    prefix_split: int
    """Keys of a split of a shared prefix; at least `narrow_split`."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """`tokens` [rows, 6]: first and end visible position, first partial, first split, number of splits, position.

    `narrow` and `wide` [items, 6]: first packed row (member * group + query head in the group), rows, table,
    begin and end position, split. `members` maps a member to its token.
    """

    tokens: NDArray[np.int64]
    members: NDArray[np.int64]
    narrow: NDArray[np.int64]
    wide: NDArray[np.int64]

    @property
    def attended_tokens(self) -> int:
        """Keys that all items read."""
        return int(sum((part[:, 4] - part[:, 3]).sum() for part in (self.narrow, self.wide)))


def runs(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each element of runs of these lengths: its run, and its place in it."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)


def _split_columns(
    first_row: NDArray[np.int64],
    rows: NDArray[np.int64],
    table: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    split_tokens: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Row blocks × the splits they see."""
    first_split = low // split_tokens
    splits = np.where(high > low, (high - 1) // split_tokens - first_split + 1, 0)
    block, place = runs(splits)
    split = first_split[block] + place
    begin = np.maximum(split * split_tokens[block], low[block])
    end = np.minimum((split + 1) * split_tokens[block], high[block])
    return np.stack([first_row[block], rows[block], table[block], begin, end, split], axis=1)


def lay_out(plan: "AttentionPlan", sizes: Splitting) -> WorkList:
    """Lay out the work of a validated plan."""
    group = plan.group_size
    lengths, queries = plan.sequence_lengths, plan.query_lengths
    sequence, place = runs(queries)
    position = (lengths - queries)[sequence] + place
    high = np.minimum(position + 1, lengths[sequence]) if plan.causal else lengths[sequence]
    high = np.maximum(high, 0)
    low = np.zeros_like(high) if plan.window is None else np.maximum(position + 1 - plan.window, 0)
    low = np.minimum(low, high)

    rows_of = queries * group
    narrow_of = rows_of <= sizes.narrow_rows
    split_of = np.where(
        narrow_of, sizes.narrow_split, np.where(rows_of <= sizes.unsplit_rows, sizes.wide_split, UNSPLIT)
    )
    token_split = split_of[sequence]
    splits = np.where(high > low, (high - 1) // token_split - low // token_split + 1, 0)
    tokens = np.zeros((plan.num_tokens, 6), np.int64)
    columns = [low, high, np.cumsum(splits) - splits, low // token_split, splits, position]
    tokens[: len(sequence)] = np.stack(columns, axis=1)

    start = np.cumsum(queries) - queries
    block_rows = np.where(narrow_of, sizes.narrow_rows, sizes.wide_rows)
    block_sequence, block_place = runs(-(-rows_of // block_rows))
    offset = block_place * block_rows[block_sequence]
    first_row = start[block_sequence] * group + offset
    rows = np.minimum(rows_of[block_sequence] - offset, block_rows[block_sequence])
    block_low, block_high = low[first_row // group], high[(first_row + rows - 1) // group]
    shared, sharers = _shared_prefix(plan, narrow_of, sizes.narrow_split)
    skipped = np.where(np.isin(block_sequence, sharers), shared, 0)
    items = _split_columns(
        first_row, rows, block_sequence, np.maximum(block_low, skipped), block_high, split_of[block_sequence]
    )
    is_narrow = narrow_of[items[:, 2]]
    members = np.arange(plan.num_tokens)
    wide = items[~is_narrow]
    if len(sharers):
        # the prefix has fewer splits of its own; they are numbered to end where the sharers' others begin
        prefix_splits = -(-shared // sizes.prefix_split)
        renumbered = shared // sizes.narrow_split - prefix_splits
        prefix_members = np.flatnonzero(np.isin(sequence, sharers))
        tokens[prefix_members, FIRST_SPLIT] += renumbered
        tokens[prefix_members, SPLITS] -= renumbered
        splits = tokens[:, SPLITS]
        tokens[:, FIRST_PARTIAL] = np.cumsum(splits) - splits
        prefix_rows = len(prefix_members) * group
        block = np.arange(0, prefix_rows, sizes.wide_rows)
        zeros = np.zeros_like(block)
        prefix_items = _split_columns(
            len(members) * group + block,
            np.minimum(prefix_rows - block, sizes.wide_rows),
            zeros + sharers[0],
            zeros,
            zeros + shared,
            zeros + sizes.prefix_split,
        )
        prefix_items[:, 5] += renumbered
        wide = np.concatenate([wide, prefix_items])
        members = np.concatenate([members, prefix_members])
    # the rows that see most come last in a sequence and first in the queue
    return WorkList(tokens, members, items[is_narrow], wide[::-1].copy())


def _shared_prefix(plan: "AttentionPlan", narrow_of: NDArray[np.bool_], whole: int) -> tuple[int, NDArray[np.int64]]:
    """How many tokens are attended once for all, whole splits only, and the sequences that take part."""
    shared = plan.shared_prefix_tokens // whole * whole
    seen = plan.sequence_lengths - (plan.query_lengths if plan.causal else 0)
    sharers = np.flatnonzero(narrow_of & (plan.query_lengths > 0) & (seen >= shared))
    return (shared, sharers) if shared and len(sharers) > 1 else (0, sharers[:0])
