"""Attention of few query rows per KV head: decode, speculative verification, short chunks.

FlashAttention's online softmax (Dao et al., 2022) over a fixed split of the keys (Flash-Decoding), with the
query heads of a KV head packed into rows, so that K and V are read once. All KV heads of an item are
served inside the loop over its tokens: in the NHD layout a block is then read as one run of bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.addressing import address_of, fill_addresses
from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.memory import fetch_add
from kvplane.kernels.cpu.simd import (
    TAG_F32,
    add,
    fma,
    keep_between,
    load,
    max_of_quarters,
    maximum,
    mul,
    or_zero,
    splat,
    store,
    sub,
)
from kvplane.kernels.cpu.simd_math import exp, tanh
from kvplane.kernels.cpu.tiles import ROWS, TILE, WIDE, outer_strip, outer_tile, score_tile

NARROW_ROWS = 16  # most rows per KV head; more are faster in lanes (wide.py)
MINUS_INFINITY = np.float32(-np.inf)


@jit
def softmax_rows(
    scores: int,
    soft_cap: np.float32,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    bounds: NDArray[np.float32],
    biases: NDArray[np.float32],
    count: int,
    state: int,
    factors: NDArray[np.float32],
) -> None:
    """Scores [count, four rows] become exp(score - running maximum), 0 outside the row's low..high-1.

    A vector holds four tokens of four rows. `state` has two vectors: the running maximum, the same for all
    tokens of a row, and the running sum, apart for each. `factors` is what the rows' outputs shrink by.
    `bounds` is scratch. `biases` [2, 16], or none: added to the first four tokens of each row, and how much more
    for each token after them.
    """
    all_low, all_high = 0, count
    for lane in range(16):
        r = lane % ROWS
        # token t of a vector that begins at v is t = v + lane // 4
        bounds[0, lane] = low[r] - lane // ROWS
        bounds[1, lane] = high[r] - lane // ROWS
        all_low = max(all_low, low[r])
        all_high = min(all_high, high[r])
    first = load(TAG_F32, address_of(bounds))
    last = load(TAG_F32, address_of(bounds) + 64)
    best = load(TAG_F32, state)
    for v in range(0, count, ROWS):
        x = load(TAG_F32, scores + v * 16)
        if soft_cap > 0:
            x = mul(splat(soft_cap), tanh(mul(x, splat(np.float32(1) / soft_cap))))
        if biases.shape[0] > 0:
            bias = address_of(biases)
            x = add(x, fma(splat(np.float32(v)), load(TAG_F32, bias + 64), load(TAG_F32, bias)))
        if v < all_low or v + ROWS > all_high:
            x = keep_between(x, first, last, np.float32(v))
        store(scores + v * 16, x)
        best = maximum(best, x)
    best = max_of_quarters(best)
    # a row that has seen no key yet must not compute -inf - -inf
    safe = or_zero(best)
    shrink = exp(sub(load(TAG_F32, state), safe))
    sums = splat(np.float32(0))
    for v in range(0, count, ROWS):
        p = exp(sub(load(TAG_F32, scores + v * 16), safe))
        store(scores + v * 16, p)
        sums = add(sums, p)
    store(state, best)
    store(state + 64, fma(load(TAG_F32, state + 64), shrink, sums))
    store(address_of(factors), shrink)


@jit
def accumulate_values(
    tag: Any,
    size: int,
    scores: int,
    values: NDArray[np.int64],
    offset: int,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    count: int,
    dim: int,
    output: int,
    factors: NDArray[np.float32],
) -> None:
    """output[r] = factors[r] * output[r] + Σ_t scores[t, r] * value[t], over the tokens row r may see.

    A key that a row may not see is not multiplied by 0 but left out: its value may be NaN.
    """
    same = True
    for r in range(1, ROWS):
        same = same and low[r] == low[0] and high[r] == high[0]
    begin = max(low[0], 0)
    end = min(high[0], count)
    packed = dim // WIDE * WIDE if same else 0
    for d in range(0, packed, WIDE):
        outer_tile(
            TAG_F32,
            tag,
            size,
            scores,
            4,
            4 * ROWS,
            values,
            offset + d * size,
            begin,
            end,
            TILE,
            output + d * 4,
            dim * 4,
            factors,
        )
    for r in range(ROWS):
        begin = max(low[r], 0)
        end = min(high[r], count)
        for d in range(packed, dim, 16):
            c = output + (r * dim + d) * 4
            outer_strip(tag, scores + r * 4, 4 * ROWS, values, offset + d * size, begin, end, c, factors[r])


@jit
def attend_narrow(
    tag: Any,
    size: int,
    dot: bool,  # noqa: ARG001 - the same arguments as attend_wide
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
    """Work through `items` until `counter` passes their number; any number of threads may share one counter.

    See work.py for the columns of `items` and `tokens`. `slopes` [query heads], or none, are ALiBi's.
    Scales are per KV head. Writes the partial outputs and LSEs of its items.
    """
    dim = query.shape[2]
    heads = query.shape[1] // group
    keys = np.empty(2 * TILE, np.int64)
    values = np.empty(2 * TILE, np.int64)
    scores = np.zeros((TILE, ROWS), np.float32)
    factors = np.empty(16, np.float32)
    bounds = np.empty((2, 16), np.float32)
    biases = np.empty((2 if slopes.shape[0] > 0 else 0, 16), np.float32)
    row_position = np.zeros(NARROW_ROWS, np.int64)
    row_low = np.zeros(NARROW_ROWS, np.int64)
    row_high = np.zeros(NARROW_ROWS, np.int64)
    low = np.zeros(ROWS, np.int64)
    high = np.zeros(ROWS, np.int64)
    queries = np.zeros((heads, NARROW_ROWS, dim), np.float32)
    output = np.zeros((heads, NARROW_ROWS, dim), np.float32)
    # of each four rows: running maximum and running sum, as softmax_rows keeps them
    state = np.zeros((heads, NARROW_ROWS // ROWS, 2, 16), np.float32)
    row_bytes = dim * 4
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
        head_begin = items[i, 6]
        head_end = items[i, 7]
        padded = (rows + ROWS - 1) // ROWS * ROWS
        for r in range(padded):
            token = members[(first + min(r, rows - 1)) // group]
            row_low[r] = tokens[token, 0]
            row_high[r] = tokens[token, 1]
            row_position[r] = tokens[token, 5]
        for head in range(head_begin, head_end):
            for r in range(padded):
                for lane in range(r % ROWS, 16, ROWS):
                    state[head, r // ROWS, 0, lane] = MINUS_INFINITY
                    state[head, r // ROWS, 1, lane] = 0
                token = members[(first + min(r, rows - 1)) // group]
                column = head * group + (first + r) % group
                for d in range(dim):
                    queries[head, r, d] = (
                        query[token, column, d] * (scale * key_scales[head]) if r < rows else np.float32(0)
                    )
                    output[head, r, d] = 0
        for start in range(begin, end, TILE):
            count = min(TILE, end - start)
            fill_addresses(segments, blocks, block_size, start, end, keys, values)
            for head in range(head_begin, head_end):
                for r in range(0, padded, ROWS):
                    for j in range(ROWS):
                        low[j] = row_low[r + j] - start
                        high[j] = min(row_high[r + j] - start, count)
                    if slopes.shape[0] > 0:
                        for lane in range(16):
                            row = r + lane % ROWS
                            slope = slopes[head * group + (first + min(row, rows - 1)) % group]
                            biases[0, lane] = slope * np.float32(start + lane // ROWS - row_position[row])
                            biases[1, lane] = slope
                    at = (head * NARROW_ROWS + r) * row_bytes
                    score_tile(
                        tag,
                        size,
                        address_of(queries) + at,
                        keys,
                        head * segments[0, 5],
                        count,
                        dim,
                        address_of(scores),
                    )
                    softmax_rows(
                        address_of(scores),
                        soft_cap,
                        low,
                        high,
                        bounds,
                        biases,
                        count,
                        address_of(state[head, r // ROWS]),
                        factors,
                    )
                    accumulate_values(
                        tag,
                        size,
                        address_of(scores),
                        values,
                        head * segments[0, 8],
                        low,
                        high,
                        count,
                        dim,
                        address_of(output) + at,
                        factors,
                    )
        for head in range(head_begin, head_end):
            for r in range(rows):
                token = members[(first + r) // group]
                place = split - tokens[token, 3]
                if place < 0 or place >= tokens[token, 4]:
                    continue
                slot = tokens[token, 2] + place
                column = head * group + (first + r) % group
                total = np.float32(0)
                for lane in range(r % ROWS, 16, ROWS):
                    total += state[head, r // ROWS, 1, lane]
                seen = total > 0 or total != total
                inverse = value_scales[head] / total if seen else np.float32(0)
                for d in range(dim):
                    partial_output[slot, column, d] = output[head, r, d] * inverse
                top = state[head, r // ROWS, 0, r % ROWS]
                partial_lse[slot, column] = top + np.log(total) if seen else MINUS_INFINITY
