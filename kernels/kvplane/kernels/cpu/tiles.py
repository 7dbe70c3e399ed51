"""The inner loops: products of a few rows with a tile of keys or values.

`score_tile` runs its lanes along the head dimension and reads K straight from the blocks. `outer_tile` is
the rank-1 update at the core of a matrix multiplication (Goto and van de Geijn, 2008): four broadcast scalars
times 64 lanes, sixteen accumulators. It serves V in a decode step and both products of many-row attention.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.simd import (
    TAG_F32,
    fma,
    horizontal_sum,
    load,
    mul,
    multiply_add,
    prefetch,
    splat,
    splat_at,
    store,
)

TILE = 64  # tokens whose scores are held at once; K and V of one head at 128 dims then fit a 32 KiB L1
ROWS = 4  # rows of a register tile
WIDE = 64  # lanes of a register tile


@jit
def score_tile(
    tag: Any,
    size: int,
    query: int,
    keys: NDArray[np.int64],
    offset: int,
    count: int,
    dim: int,
    scores: NDArray[np.float32],
) -> None:
    """scores[r, t] = query[r] · key[t] for four rows; one more column is written when `count` is odd.

    `keys` holds TILE addresses of this tile and then those of the next, which are prefetched: no hardware
    follows a block table.
    """
    row = dim * 4
    zero = splat(np.float32(0))
    for t in range(0, count, 2):
        for byte in range(0, dim * size, 64):
            prefetch(keys[t + TILE] + offset + byte)
            prefetch(keys[t + TILE + 1] + offset + byte)
        a = keys[t] + offset
        b = keys[t + 1] + offset
        a0 = a1 = a2 = a3 = zero
        b0 = b1 = b2 = b3 = zero
        q = query
        for _ in range(dim // 16):
            x = load(tag, a)
            y = load(tag, b)
            q0 = load(TAG_F32, q)
            a0 = fma(x, q0, a0)
            b0 = fma(y, q0, b0)
            q1 = load(TAG_F32, q + row)
            a1 = fma(x, q1, a1)
            b1 = fma(y, q1, b1)
            q2 = load(TAG_F32, q + 2 * row)
            a2 = fma(x, q2, a2)
            b2 = fma(y, q2, b2)
            q3 = load(TAG_F32, q + 3 * row)
            a3 = fma(x, q3, a3)
            b3 = fma(y, q3, b3)
            a += size * 16
            b += size * 16
            q += 64
        scores[0, t] = horizontal_sum(a0)
        scores[0, t + 1] = horizontal_sum(b0)
        scores[1, t] = horizontal_sum(a1)
        scores[1, t + 1] = horizontal_sum(b1)
        scores[2, t] = horizontal_sum(a2)
        scores[2, t + 1] = horizontal_sum(b2)
        scores[3, t] = horizontal_sum(a3)
        scores[3, t + 1] = horizontal_sum(b3)


@jit
def outer_tile(
    kind: Any,
    tag: Any,
    size: int,
    a: int,
    a_row: int,
    a_step: int,
    b: NDArray[np.int64],
    offset: int,
    begin: int,
    end: int,
    ahead: int,
    c: int,
    c_row: int,
    factors: NDArray[np.float32],
) -> None:
    """C[i] = factors[i] * C[i] + Σ_k A[i, k] * B[k], for four rows of 64 lanes and k in begin..end-1.

    A is float32 with byte strides `a_row` and `a_step`; row k of B begins at `b[k] + offset`, in the tag's
    storage; C is float32. With a bfloat16 `kind`, elements of A and B are pairs along k (`simd.pair`). With
    `ahead` > 0 the lines of row k + ahead are prefetched.
    """
    c0 = splat(factors[0])
    c1 = splat(factors[1])
    c2 = splat(factors[2])
    c3 = splat(factors[3])
    r1 = c + c_row
    r2 = r1 + c_row
    r3 = r2 + c_row
    a00 = mul(load(TAG_F32, c), c0)
    a01 = mul(load(TAG_F32, c + 64), c0)
    a02 = mul(load(TAG_F32, c + 128), c0)
    a03 = mul(load(TAG_F32, c + 192), c0)
    a10 = mul(load(TAG_F32, r1), c1)
    a11 = mul(load(TAG_F32, r1 + 64), c1)
    a12 = mul(load(TAG_F32, r1 + 128), c1)
    a13 = mul(load(TAG_F32, r1 + 192), c1)
    a20 = mul(load(TAG_F32, r2), c2)
    a21 = mul(load(TAG_F32, r2 + 64), c2)
    a22 = mul(load(TAG_F32, r2 + 128), c2)
    a23 = mul(load(TAG_F32, r2 + 192), c2)
    a30 = mul(load(TAG_F32, r3), c3)
    a31 = mul(load(TAG_F32, r3 + 64), c3)
    a32 = mul(load(TAG_F32, r3 + 128), c3)
    a33 = mul(load(TAG_F32, r3 + 192), c3)
    for k in range(begin, end):
        at = b[k] + offset
        if ahead > 0:
            for byte in range(0, 64 * size, 64):
                prefetch(b[k + ahead] + offset + byte)
        v0 = load(tag, at)
        v1 = load(tag, at + 16 * size)
        v2 = load(tag, at + 32 * size)
        v3 = load(tag, at + 48 * size)
        scalar = a + k * a_step
        x = splat_at(scalar)
        a00 = multiply_add(kind, v0, x, a00)
        a01 = multiply_add(kind, v1, x, a01)
        a02 = multiply_add(kind, v2, x, a02)
        a03 = multiply_add(kind, v3, x, a03)
        x = splat_at(scalar + a_row)
        a10 = multiply_add(kind, v0, x, a10)
        a11 = multiply_add(kind, v1, x, a11)
        a12 = multiply_add(kind, v2, x, a12)
        a13 = multiply_add(kind, v3, x, a13)
        x = splat_at(scalar + 2 * a_row)
        a20 = multiply_add(kind, v0, x, a20)
        a21 = multiply_add(kind, v1, x, a21)
        a22 = multiply_add(kind, v2, x, a22)
        a23 = multiply_add(kind, v3, x, a23)
        x = splat_at(scalar + 3 * a_row)
        a30 = multiply_add(kind, v0, x, a30)
        a31 = multiply_add(kind, v1, x, a31)
        a32 = multiply_add(kind, v2, x, a32)
        a33 = multiply_add(kind, v3, x, a33)
    store(c, a00)
    store(c + 64, a01)
    store(c + 128, a02)
    store(c + 192, a03)
    store(r1, a10)
    store(r1 + 64, a11)
    store(r1 + 128, a12)
    store(r1 + 192, a13)
    store(r2, a20)
    store(r2 + 64, a21)
    store(r2 + 128, a22)
    store(r2 + 192, a23)
    store(r3, a30)
    store(r3 + 64, a31)
    store(r3 + 128, a32)
    store(r3 + 192, a33)


@jit
def outer_strip(
    tag: Any,
    a: int,
    b: NDArray[np.int64],
    offset: int,
    begin: int,
    end: int,
    c: int,
    factor: np.float32,
) -> None:
    """C = factor * C + Σ_k A[k] * B[k] for one row of 16 lanes: what `outer_tile` leaves over."""
    total = mul(load(TAG_F32, c), splat(factor))
    for k in range(begin, end):
        total = fma(load(tag, b[k] + offset), splat_at(a + k * 4), total)
    store(c, total)
