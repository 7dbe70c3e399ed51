"""Attention of many query rows per KV head: prefill, chunks over a paged prefix, shared prefixes.

The same online softmax as in narrow.py, with the lanes along query rows: a tile of keys is unpacked once for
64 rows, both products run as fast as a matrix multiplication, and the softmax has no horizontal step.

Where the host multiplies bfloat16 natively, and query and cache are bfloat16, the products take pairs
(`dot`). Scores stay as exact; exp(score) is rounded to bfloat16, as flash attention in bfloat16 does.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.addressing import address_of, fill_addresses
from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.lanes import (
    WIDE_BYTES,
    accumulate_seen,
    all_finite,
    convert_rows,
    copy_rows,
    pair_lanes,
    prefetch_next,
    softmax_lanes,
    zip_rows,
)
from kvplane.kernels.cpu.memory import fetch_add
from kvplane.kernels.cpu.narrow import MINUS_INFINITY
from kvplane.kernels.cpu.simd import TAG_BF16, TAG_F32
from kvplane.kernels.cpu.tiles import ROWS, TILE, WIDE, outer_tile


@jit
def score_lanes(
    dot: bool,
    keys: int,
    count: int,
    dim: int,
    queries: NDArray[np.int64],
    scores: NDArray[np.int64],
    ones: NDArray[np.float32],
) -> None:
    """scores[t] += key[t] · queries, for the rows of a tile and all lanes."""
    for t in range(0, count, ROWS):
        if dot:
            row = dim * 2
            outer_tile(
                TAG_BF16,
                TAG_F32,
                4,
                keys + t * row,
                row,
                4,
                queries,
                0,
                0,
                dim // 2,
                0,
                scores[t],
                WIDE_BYTES,
                ones,
            )
        else:
            row = dim * 4
            outer_tile(
                TAG_F32,
                TAG_F32,
                4,
                keys + t * row,
                row,
                4,
                queries,
                0,
                0,
                dim,
                0,
                scores[t],
                WIDE_BYTES,
                ones,
            )


@jit
def accumulate_lanes(
    dot: bool,
    values: int,
    count: int,
    dim: int,
    scores: NDArray[np.int64],
    output: int,
    ones: NDArray[np.float32],
) -> None:
    """output[d] += Σ_t value[t, d] * scores[t], for all lanes."""
    for d in range(0, dim, ROWS):
        a, c = values + d * 4, output + d * WIDE_BYTES
        if dot:
            outer_tile(TAG_BF16, TAG_F32, 4, a, 4, dim * 4, scores, 0, 0, (count + 1) // 2, 0, c, WIDE_BYTES, ones)
        else:
            outer_tile(TAG_F32, TAG_F32, 4, a, 4, dim * 4, scores, 0, 0, count, 0, c, WIDE_BYTES, ones)


@jit
def attend_wide(
    tag: Any,
    size: int,
    dot: bool,
    segments: NDArray[np.int64],
    tables: NDArray[np.int32],
    block_size: int,
    items: NDArray[np.int64],
    counter: NDArray[np.int64],
    members: NDArray[np.int64],
    tokens: NDArray[np.int64],
    query: NDArray[np.float32],
    group: int,
    scale: np.float32,
    soft_cap: np.float32,
    slopes: NDArray[np.float32],
    key_scales: NDArray[np.float32],
    value_scales: NDArray[np.float32],
    partial_output: NDArray[np.float32],
    partial_lse: NDArray[np.float32],
) -> None:
    """Like `attend_narrow`, for items of up to 64 rows and one KV head.

    `dot` needs a bfloat16 cache and a query of values that bfloat16 can hold.
    """
    dim = query.shape[2]
    keys = np.empty(2 * TILE, np.int64)
    values = np.empty(2 * TILE, np.int64)
    key_tile = np.zeros((TILE, dim), np.float32)
    value_tile = np.zeros((TILE, dim), np.float32)
    query_lanes = np.zeros((dim, WIDE), np.float32)
    query_rows = np.empty(dim, np.int64)
    for d in range(dim):
        query_rows[d] = address_of(query_lanes) + d * WIDE_BYTES
    scores = np.zeros((TILE, WIDE), np.float32)
    score_rows = np.empty(TILE, np.int64)
    for t in range(TILE):
        score_rows[t] = address_of(scores) + t * WIDE_BYTES
    output = np.zeros((dim, WIDE), np.float32)
    # bounds of lanes relative to a tile, top, total, bias and its step
    state = np.zeros((6, WIDE), np.float32)
    biased = slopes.shape[0] > 0
    row_position = np.zeros(WIDE, np.int64)
    zeros = np.zeros(dim, np.float32)
    row_low = np.zeros(WIDE, np.int64)
    row_high = np.zeros(WIDE, np.int64)
    ones = np.ones(ROWS, np.float32)
    while True:
        i = fetch_add(address_of(counter), 1)
        if i >= items.shape[0]:
            return
        first = items[i, 0]
        rows = items[i, 1]
        blocks = tables[items[i, 2]]
        begin = items[i, 3]
        end = items[i, 4]
        split = items[i, 5]
        head = items[i, 6]
        key_scale = np.float32(scale * key_scales[head])
        lowest_high = end
        highest_low = begin
        for r in range(WIDE):
            token = members[(first + min(r, rows - 1)) // group]
            column = head * group + (first + min(r, rows - 1)) % group
            row_low[r] = tokens[token, 0]
            row_high[r] = tokens[token, 1]
            row_position[r] = tokens[token, 5]
            if biased:
                state[5, r] = slopes[column]
            lowest_high = min(lowest_high, row_high[r])
            highest_low = max(highest_low, row_low[r])
            state[2, r] = MINUS_INFINITY
            state[3, r] = 0
            for d in range(dim):
                query_lanes[d, r] = query[token, column, d]
                output[d, r] = 0
        if dot:
            pair_lanes(address_of(query_lanes), dim)
        for start in range(begin, end, TILE):
            count = min(TILE, end - start)
            fill_addresses(segments, blocks, block_size, start, end, keys, values)
            key_offset = head * segments[0, 5]
            value_offset = head * segments[0, 8]
            prefetch_next(keys, key_offset, count, dim * size)
            prefetch_next(values, value_offset, count, dim * size)
            if dot:
                copy_rows(keys, key_offset, count, dim * size, address_of(key_tile))
            else:
                convert_rows(tag, size, keys, key_offset, count, dim, address_of(key_tile))
            masked = highest_low > start or lowest_high < start + count
            if masked:
                for r in range(WIDE):
                    state[0, r] = max(row_low[r] - start, 0)
                    state[1, r] = max(min(row_high[r] - start, TILE), 0)
            if biased:
                for r in range(WIDE):
                    state[4, r] = state[5, r] * np.float32(start - row_position[r])
            for t in range(count):
                for r in range(WIDE):
                    scores[t, r] = 0
            score_lanes(dot, address_of(key_tile), count, dim, query_rows, score_rows, ones)
            softmax_lanes(
                score_rows[0], key_scale, soft_cap, masked, biased, address_of(state), count, address_of(output), dim
            )
            # a masked tile stays float32: its values have to be searched for NaN
            in_pairs = dot and not masked
            if in_pairs:
                zip_rows(values, value_offset, count, dim, address_of(zeros), address_of(value_tile))
                pair_lanes(score_rows[0], count)
            else:
                convert_rows(tag, size, values, value_offset, count, dim, address_of(value_tile))
            if masked and not all_finite(address_of(value_tile), count * dim):
                accumulate_seen(scores, value_tile, state, count, output)
            else:
                accumulate_lanes(in_pairs, address_of(value_tile), count, dim, score_rows, address_of(output), ones)
        for r in range(rows):
            token = members[(first + r) // group]
            place = split - tokens[token, 3]
            if place < 0 or place >= tokens[token, 4]:
                continue
            slot = tokens[token, 2] + place
            column = head * group + (first + r) % group
            total = state[3, r]
            seen = total > 0 or total != total
            inverse = value_scales[head] / total if seen else np.float32(0)
            for d in range(dim):
                partial_output[slot, column, d] = output[d, r] * inverse
            partial_lse[slot, column] = state[2, r] + np.log(total) if seen else MINUS_INFINITY
