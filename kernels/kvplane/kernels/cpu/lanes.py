"""The steps of a tile of many-row attention: lanes are query rows, rows are tokens or head dimensions.

Buffers are float32 [.., 64 lanes]. With `pairs`, two bfloat16 share a float32's place: consecutive head
dimensions for the scores, consecutive tokens for the outputs.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.memory import copy_bytes, prefetch
from kvplane.kernels.cpu.simd import (
    TAG_F32,
    add,
    fma,
    horizontal_sum,
    keep_between,
    load,
    maximum,
    mul,
    or_zero,
    pair,
    splat,
    store,
    sub,
    zip_shorts,
)
from kvplane.kernels.cpu.simd_math import exp, tanh
from kvplane.kernels.cpu.tiles import TILE, WIDE

WIDE_BYTES = WIDE * 4


@jit
def prefetch_next(rows: NDArray[np.int64], offset: int, count: int, row_bytes: int) -> None:
    """Ask for the rows one tile further: no hardware follows a block table."""
    for t in range(TILE, TILE + count):
        for byte in range(0, row_bytes, 64):
            prefetch(rows[t] + offset + byte)


@jit
def convert_rows(tag: Any, size: int, rows: NDArray[np.int64], offset: int, count: int, dim: int, into: int) -> None:
    """Rows at scattered addresses become float32 rows [count, dim]."""
    for t in range(count):
        for d in range(0, dim, 16):
            store(into + (t * dim + d) * 4, load(tag, rows[t] + offset + d * size))


@jit
def copy_rows(rows: NDArray[np.int64], offset: int, count: int, row_bytes: int, into: int) -> None:
    """Rows at scattered addresses become rows one after the other, as they are."""
    for t in range(count):
        copy_bytes(into + t * row_bytes, rows[t] + offset, row_bytes)


@jit
def zip_rows(rows: NDArray[np.int64], offset: int, count: int, dim: int, zeros: int, into: int) -> None:
    """Rows of 16-bit elements become pairs of tokens [⌈count / 2⌉, dim]; an odd last one pairs with zeros."""
    for t in range(0, count, 2):
        for d in range(0, dim, 16):
            second = rows[t + 1] + offset + d * 2 if t + 1 < count else zeros
            store(into + (t // 2 * dim + d) * 4, zip_shorts(rows[t] + offset + d * 2, second))


@jit
def pair_lanes(buffer: int, count: int) -> None:
    """Row i of a buffer becomes the pairs of its rows 2i and 2i + 1, in place; an odd last meets zeros."""
    for i in range((count + 1) // 2):
        for lane in range(0, WIDE_BYTES, 64):
            at = buffer + 2 * i * WIDE_BYTES + lane
            second = load(TAG_F32, at + WIDE_BYTES) if 2 * i + 1 < count else splat(np.float32(0))
            store(buffer + i * WIDE_BYTES + lane, pair(load(TAG_F32, at), second))


@jit
def softmax_lanes(
    scores: int,
    scale: np.float32,
    soft_cap: np.float32,
    masked: bool,
    biased: bool,
    state: int,
    count: int,
    output: int,
    dim: int,
) -> None:
    """Raw scores [count, lanes] become exp(score - running maximum of the lane).

    `state` has six rows of lanes: first and end visible token of this tile (read if `masked`), running maximum
    and running sum, and what is added to the first score and how much more for each after it (if `biased`).
    Maximum and sum are updated, and `output` [dim, lanes] shrinks to the new maximum.
    """
    for lane in range(0, WIDE_BYTES, 64):
        low = load(TAG_F32, state + lane)
        high = load(TAG_F32, state + WIDE_BYTES + lane)
        top = state + 2 * WIDE_BYTES + lane
        total = state + 3 * WIDE_BYTES + lane
        best = load(TAG_F32, top)
        for t in range(count):
            at = scores + t * WIDE_BYTES + lane
            x = mul(load(TAG_F32, at), splat(scale))
            if soft_cap > 0:
                x = mul(splat(soft_cap), tanh(mul(x, splat(np.float32(1) / soft_cap))))
            if biased:
                bias = load(TAG_F32, state + 4 * WIDE_BYTES + lane)
                x = add(x, fma(splat(np.float32(t)), load(TAG_F32, state + 5 * WIDE_BYTES + lane), bias))
            if masked:
                x = keep_between(x, low, high, np.float32(t))
            store(at, x)
            best = maximum(best, x)
        safe = or_zero(best)
        shrink = exp(sub(load(TAG_F32, top), safe))
        sums = splat(np.float32(0))
        for t in range(count):
            at = scores + t * WIDE_BYTES + lane
            p = exp(sub(load(TAG_F32, at), safe))
            store(at, p)
            sums = add(sums, p)
        store(top, best)
        store(total, fma(load(TAG_F32, total), shrink, sums))
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
    """output[:, lane] += Σ scores[t, lane] * values[t] over what the lane may see: 0 * NaN would be NaN."""
    for lane in range(WIDE):
        for t in range(int(state[0, lane]), min(int(state[1, lane]), count)):
            for d in range(output.shape[0]):
                output[d, lane] += scores[t, lane] * values[t, d]
