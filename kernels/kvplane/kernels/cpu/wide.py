"""Attention of many query rows per KV head: prefill, chunks over a paged prefix, shared prefixes.

The same online softmax as in narrow.py, with the lanes along query rows: a tile of keys is converted to
float32 once for 64 rows, both products run at the speed of a matrix multiplication, and the softmax has no
horizontal step.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.addressing import address_of, fill_addresses
from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.narrow import MINUS_INFINITY
from kvplane.kernels.cpu.simd import (
    TAG_F32,
    add,
    exp,
    fetch_add,
    horizontal_sum,
    keep_between,
    load,
    maximum,
    mul,
    or_zero,
    prefetch,
    splat,
    store,
    sub,
    tanh,
)
from kvplane.kernels.cpu.tiles import ROWS, TILE, WIDE, outer_tile

WIDE_BYTES = WIDE * 4


@jit
def convert_rows(
    tag: Any, size: int, rows: NDArray[np.int64], offset: int, count: int, dim: int, into: int
) -> None:
    """Rows at scattered addresses become float32 rows one after the other; the next tile's are prefetched."""
    for t in range(count):
        at = rows[t] + offset
        for byte in range(0, dim * size, 64):
            prefetch(rows[t + TILE] + offset + byte)
        for d in range(0, dim, 16):
            store(into + (t * dim + d) * 4, load(tag, at + d * size))


@jit
def softmax_lanes(
    scores: int,
    soft_cap: np.float32,
    masked: bool,
    low: int,
    high: int,
    count: int,
    top: int,
    total: int,
    output: int,
    dim: int,
) -> None:
    """Scores[t, lane] become exp(score - running maximum of the lane); lanes see low..high-1 where `masked`.

    Updates the lanes' running maximum and sum and shrinks `output` [dim, lanes] to the new maximum.
    """
    for lane in range(0, WIDE_BYTES, 64):
        first = load(TAG_F32, low + lane)
        last = load(TAG_F32, high + lane)
        best = load(TAG_F32, top + lane)
        for t in range(count):
            at = scores + t * WIDE_BYTES + lane
            x = load(TAG_F32, at)
            if soft_cap > 0:
                x = mul(splat(soft_cap), tanh(mul(x, splat(np.float32(1) / soft_cap))))
            if masked:
                x = keep_between(x, first, last, np.float32(t))
            if masked or soft_cap > 0:
                store(at, x)
            best = maximum(best, x)
        safe = or_zero(best)
        shrink = exp(sub(load(TAG_F32, top + lane), safe))
        sums = mul(load(TAG_F32, total + lane), shrink)
        for t in range(count):
            at = scores + t * WIDE_BYTES + lane
            p = exp(sub(load(TAG_F32, at), safe))
            store(at, p)
            sums = add(sums, p)
        store(top + lane, best)
        store(total + lane, sums)
        for d in range(dim):
            at = output + d * WIDE_BYTES + lane
            store(at, mul(load(TAG_F32, at), shrink))


@jit
def all_finite(values: int, count: int) -> bool:
    """Whether `count` float32 (a multiple of 16) at an address hold neither NaN nor infinity."""
    none = splat(np.float32(0))
    for i in range(0, count, 16):
        none = add(none, mul(load(TAG_F32, values + i * 4), splat(np.float32(0))))
    return horizontal_sum(none) == 0  # type: ignore[no-any-return]


@jit
def accumulate_seen(
    scores: NDArray[np.float32],
    values: NDArray[np.float32],
    state: NDArray[np.float32],
    count: int,
    output: NDArray[np.float32],
) -> None:
    """output[:, lane] += Σ scores[t, lane] * values[t], without the t a lane may not see: 0 * NaN is NaN."""
    for lane in range(WIDE):
        for t in range(int(state[0, lane]), min(int(state[1, lane]), count)):
            for d in range(output.shape[0]):
                output[d, lane] += scores[t, lane] * values[t, d]


@jit
def attend_wide(
    tag: Any,
    size: int,
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
    partial_output: NDArray[np.float32],
    partial_lse: NDArray[np.float32],
) -> None:
    """Like `attend_narrow`, for items of up to 64 rows and one KV head."""
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
    # bounds of lanes relative to a tile, top, total
    state = np.zeros((4, WIDE), np.float32)
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
        lowest_high = end
        highest_low = begin
        for r in range(WIDE):
            token = members[(first + min(r, rows - 1)) // group]
            column = head * group + (first + min(r, rows - 1)) % group
            row_low[r] = tokens[token, 0]
            row_high[r] = tokens[token, 1]
            lowest_high = min(lowest_high, row_high[r])
            highest_low = max(highest_low, row_low[r])
            state[2, r] = MINUS_INFINITY
            state[3, r] = 0
            for d in range(dim):
                query_lanes[d, r] = query[token, column, d] * scale
                output[d, r] = 0
        for start in range(begin, end, TILE):
            count = min(TILE, end - start)
            fill_addresses(segments, blocks, block_size, start, end, keys, values)
            convert_rows(tag, size, keys, head * segments[0, 5], count, dim, address_of(key_tile))
            convert_rows(tag, size, values, head * segments[0, 8], count, dim, address_of(value_tile))
            masked = highest_low > start or lowest_high < start + count
            if masked:
                for r in range(WIDE):
                    state[0, r] = max(row_low[r] - start, 0)
                    state[1, r] = max(min(row_high[r] - start, TILE), 0)
            for t in range(count):
                for r in range(WIDE):
                    scores[t, r] = 0
            for t in range(0, count, ROWS):
                outer_tile(
                    TAG_F32,
                    4,
                    address_of(key_tile) + t * dim * 4,
                    dim * 4,
                    4,
                    query_rows,
                    0,
                    0,
                    dim,
                    0,
                    score_rows[t],
                    WIDE_BYTES,
                    ones,
                )
            bounds = address_of(state)
            softmax_lanes(
                score_rows[0],
                soft_cap,
                masked,
                bounds,
                bounds + WIDE_BYTES,
                count,
                bounds + 2 * WIDE_BYTES,
                bounds + 3 * WIDE_BYTES,
                address_of(output),
                dim,
            )
            if masked and not all_finite(address_of(value_tile), count * dim):
                accumulate_seen(scores, value_tile, state, count, output)
                continue
            for d in range(0, dim, ROWS):
                outer_tile(
                    TAG_F32,
                    4,
                    address_of(value_tile) + d * 4,
                    4,
                    dim * 4,
                    score_rows,
                    0,
                    0,
                    count,
                    0,
                    address_of(output) + d * WIDE_BYTES,
                    WIDE_BYTES,
                    ones,
                )
        for r in range(rows):
            token = members[(first + r) // group]
            place = split - tokens[token, 3]
            if place < 0 or place >= tokens[token, 4]:
                continue
            slot = tokens[token, 2] + place
            column = head * group + (first + r) % group
            total = state[3, r]
            seen = total > 0 or total != total
            inverse = np.float32(1) / total if seen else np.float32(0)
            for d in range(dim):
                partial_output[slot, column, d] = output[d, r] * inverse
            partial_lse[slot, column] = state[2, r] + np.log(total) if seen else MINUS_INFINITY
