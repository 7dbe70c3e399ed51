"""The work list of a plan: which rows meet which keys in which item, and where partial results go.

Splits of the keys have a fixed length in tokens, counted from position 0, and everything else about an item
depends on its own sequence only. So a sequence gets the same bits alone and in any batch, with any number of
threads, whatever ids its blocks have.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.narrow import NARROW_ROWS
from kvplane.kernels.cpu.threads import get_num_threads
from kvplane.kernels.cpu.tiles import WIDE

if TYPE_CHECKING:
    from kvplane.kernels.planning import AttentionPlan

NARROW_SPLIT = 512
# Many rows share each read of K and V, so splitting serves parallelism only and costs partial outputs.
WIDE_SPLIT = 4096
PREFIX_SPLIT = 2048
UNSPLIT_ROWS = 256
UNSPLIT = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class CpuWork:
    """`tokens` [rows, 5]: first and end visible position, first partial, first split, number of splits.

    `narrow` and `wide` [items, 8]: first packed row (member * group + query head in the group), rows, table,
    begin and end position, split, first and end KV head. `members` maps a member to its token.
    """

    tokens: NDArray[np.int64]
    members: NDArray[np.int64]
    narrow: NDArray[np.int64]
    wide: NDArray[np.int64]
    attended_tokens: int
    partial_output: NDArray[np.float32]  # [partials, query heads, head_dim]
    partial_lse: NDArray[np.float32]  # [partials, query heads]
    output: NDArray[np.float32]  # [rows, query heads, head_dim]


def _runs(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
    """Row blocks × the splits they see; the last two columns are left for the heads."""
    first_split = low // split_tokens
    splits = np.where(high > low, (high - 1) // split_tokens - first_split + 1, 0)
    block, place = _runs(splits)
    split = first_split[block] + place
    begin = np.maximum(split * split_tokens[block], low[block])
    end = np.minimum((split + 1) * split_tokens[block], high[block])
    none = np.zeros_like(split)
    return np.stack([first_row[block], rows[block], table[block], begin, end, split, none, none], axis=1)


def _per_heads(items: NDArray[np.int64], num_heads: int, parts: int) -> NDArray[np.int64]:
    """Each item `parts` times, for `parts` ranges of KV heads."""
    bounds = np.arange(parts + 1) * num_heads // parts
    result = np.repeat(items, parts, axis=0)
    result[:, 6] = np.tile(bounds[:-1], len(items))
    result[:, 7] = np.tile(bounds[1:], len(items))
    return result


def prepare(plan: "AttentionPlan") -> CpuWork:
    """Lay out the work of a validated plan; allocates its workspace."""
    geometry, group = plan.geometry, plan.group_size
    lengths, queries = plan.sequence_lengths, plan.query_lengths
    sequence, place = _runs(queries)
    position = (lengths - queries)[sequence] + place
    high = np.minimum(position + 1, lengths[sequence]) if plan.causal else lengths[sequence]
    high = np.maximum(high, 0)
    low = np.zeros_like(high) if plan.window is None else np.maximum(position + 1 - plan.window, 0)
    low = np.minimum(low, high)

    rows_of = queries * group
    narrow_of = rows_of <= NARROW_ROWS
    split_of = np.where(narrow_of, NARROW_SPLIT, np.where(rows_of <= UNSPLIT_ROWS, WIDE_SPLIT, UNSPLIT))
    token_split = split_of[sequence]
    splits = np.where(high > low, (high - 1) // token_split - low // token_split + 1, 0)
    tokens = np.zeros((plan.num_tokens, 5), np.int64)
    tokens[: len(sequence)] = np.stack([low, high, np.cumsum(splits) - splits, low // token_split, splits], axis=1)

    start = np.cumsum(queries) - queries
    block_rows = np.where(narrow_of, NARROW_ROWS, WIDE)
    block_sequence, block_place = _runs(-(-rows_of // block_rows))
    offset = block_place * block_rows[block_sequence]
    first_row = start[block_sequence] * group + offset
    rows = np.minimum(rows_of[block_sequence] - offset, block_rows[block_sequence])
    block_low, block_high = low[first_row // group], high[(first_row + rows - 1) // group]
    shared, sharers = _shared_prefix(plan, narrow_of)
    skipped = np.where(np.isin(block_sequence, sharers), shared, 0)
    items = _split_columns(
        first_row, rows, block_sequence, np.maximum(block_low, skipped), block_high, split_of[block_sequence]
    )
    is_narrow = narrow_of[items[:, 2]]
    members = np.arange(plan.num_tokens)
    wide = items[~is_narrow]
    if len(sharers):
        # the prefix has fewer splits of its own; they are numbered to end where the sharers' others begin
        prefix_splits = -(-shared // PREFIX_SPLIT)
        renumbered = shared // NARROW_SPLIT - prefix_splits
        prefix_members = np.flatnonzero(np.isin(sequence, sharers))
        tokens[prefix_members, 3] += renumbered
        tokens[prefix_members, 4] -= renumbered
        splits = tokens[:, 4]
        tokens[:, 2] = np.cumsum(splits) - splits
        prefix_rows = len(prefix_members) * group
        block = np.arange(0, prefix_rows, WIDE)
        zeros = np.zeros_like(block)
        prefix_items = _split_columns(
            len(members) * group + block,
            np.minimum(prefix_rows - block, WIDE),
            zeros + sharers[0],
            zeros,
            zeros + shared,
            zeros + PREFIX_SPLIT,
        )
        prefix_items[:, 5] += renumbered
        wide = np.concatenate([wide, prefix_items])
        members = np.concatenate([members, prefix_members])

    narrow = items[is_narrow]
    parts = min(geometry.num_kv_heads, max(1, -(-4 * get_num_threads() // max(len(narrow), 1))))
    partials = int(splits.sum())
    heads, dim = plan.num_query_heads, geometry.head_dim
    return CpuWork(
        tokens=tokens,
        members=members,
        narrow=_per_heads(narrow, geometry.num_kv_heads, parts),
        # the rows that see most come last in a sequence and first in the queue
        wide=_per_heads(wide, geometry.num_kv_heads, geometry.num_kv_heads)[::-1].copy(),
        attended_tokens=int(sum((part[:, 4] - part[:, 3]).sum() for part in (narrow, wide))),
        partial_output=np.empty((partials, heads, dim), np.float32),
        partial_lse=np.empty((partials, heads), np.float32),
        output=np.empty((plan.num_tokens, heads, dim), np.float32),
    )


def _shared_prefix(plan: "AttentionPlan", narrow_of: NDArray[np.bool_]) -> tuple[int, NDArray[np.int64]]:
    """How many tokens are attended once for all, whole splits only, and the sequences that take part."""
    shared = plan.shared_prefix_tokens // NARROW_SPLIT * NARROW_SPLIT
    seen = plan.sequence_lengths - (plan.query_lengths if plan.causal else 0)
    sharers = np.flatnonzero(narrow_of & (plan.query_lengths > 0) & (seen >= shared))
    return (shared, sharers) if shared and len(sharers) > 1 else (0, sharers[:0])
