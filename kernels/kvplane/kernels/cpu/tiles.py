"""The inner loops: products of a few rows with a tile of keys or values.

`score_tile` runs its lanes along the head dimension and reads K straight from the blocks. `outer_tile` is
the rank-1 update at the core of a matrix multiplication (Goto and van de Geijn, 2008): four broadcast scalars
times 64 lanes, sixteen accumulators. It serves V in a decode step and both products of many-row attention.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.memory import prefetch
from kvplane.kernels.cpu.simd import TAG_F32, fma, horizontal_sums, load, multiply_add, splat, splat_at, store

TILE = 64  # tokens whose scores are held at once; K and V of one head at 128 dims then fit a 32 KiB L1
ROWS = 4  # rows of a register tile
WIDE = 64  # lanes of a register tile


@jit
def score_tile(
    tag: Any, size: int, query: int, keys: NDArray[np.int64], offset: int, count: int, dim: int, scores: int
) -> None:
    """scores[t, r] = query[r] · key[t] for four rows; `count` is rounded up to four tokens.

    `keys` holds TILE addresses of this tile and then those of the next, which are prefetched: no hardware
    follows a block table. Two tokens at a time, since more streams at once are slower to read.
    """
    row = dim * 4
    zero = splat(np.float32(0))
    for t in range(0, count, 4):
        a = keys[t + 0] + offset
        b = keys[t + 1] + offset
        next_a = keys[t + TILE + 0] - keys[t + 0]
        next_b = keys[t + TILE + 1] - keys[t + 1]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
        q = query
        for _ in range(dim // 16):
            prefetch(a + next_a)
            prefetch(b + next_b)
            k = load(tag, a)
            m = load(tag, b)
            x = load(TAG_F32, q)
            a0 = fma(k, x, a0)
            b0 = fma(m, x, b0)
            x = load(TAG_F32, q + row)
            a1 = fma(k, x, a1)
            b1 = fma(m, x, b1)
            x = load(TAG_F32, q + 2 * row)
            a2 = fma(k, x, a2)
            b2 = fma(m, x, b2)
            x = load(TAG_F32, q + 3 * row)
            a3 = fma(k, x, a3)
            b3 = fma(m, x, b3)
            a += size * 16
            b += size * 16
            q += 64
        c = keys[t + 2] + offset
        d = keys[t + 3] + offset
        next_c = keys[t + TILE + 2] - keys[t + 2]
        next_d = keys[t + TILE + 3] - keys[t + 3]
        c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = zero
        q = query
        for _ in range(dim // 16):
            prefetch(c + next_c)
            prefetch(d + next_d)
            k = load(tag, c)
            m = load(tag, d)
            x = load(TAG_F32, q)
            c0 = fma(k, x, c0)
            d0 = fma(m, x, d0)
            x = load(TAG_F32, q + row)
            c1 = fma(k, x, c1)
            d1 = fma(m, x, d1)
            x = load(TAG_F32, q + 2 * row)
            c2 = fma(k, x, c2)
            d2 = fma(m, x, d2)
            x = load(TAG_F32, q + 3 * row)
            c3 = fma(k, x, c3)
            d3 = fma(m, x, d3)
            c += size * 16
            d += size * 16
            q += 64
        sums = horizontal_sums(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3)
        store(scores + t * 16, sums)


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
    # from zero, and C added at the end: a sum of sums loses less than one long sum
    a00 = a01 = a02 = a03 = splat(np.float32(0))
    a10 = a11 = a12 = a13 = splat(np.float32(0))
    a20 = a21 = a22 = a23 = splat(np.float32(0))
    a30 = a31 = a32 = a33 = splat(np.float32(0))
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
    r1 = c + c_row
    r2 = r1 + c_row
    r3 = r2 + c_row
    store(c, fma(load(TAG_F32, c), c0, a00))
    store(c + 64, fma(load(TAG_F32, c + 64), c0, a01))
    store(c + 128, fma(load(TAG_F32, c + 128), c0, a02))
    store(c + 192, fma(load(TAG_F32, c + 192), c0, a03))
    store(r1, fma(load(TAG_F32, r1), c1, a10))
    store(r1 + 64, fma(load(TAG_F32, r1 + 64), c1, a11))
    store(r1 + 128, fma(load(TAG_F32, r1 + 128), c1, a12))
    store(r1 + 192, fma(load(TAG_F32, r1 + 192), c1, a13))
    store(r2, fma(load(TAG_F32, r2), c2, a20))
    store(r2 + 64, fma(load(TAG_F32, r2 + 64), c2, a21))
    store(r2 + 128, fma(load(TAG_F32, r2 + 128), c2, a22))
    store(r2 + 192, fma(load(TAG_F32, r2 + 192), c2, a23))
    store(r3, fma(load(TAG_F32, r3), c3, a30))
    store(r3 + 64, fma(load(TAG_F32, r3 + 64), c3, a31))
    store(r3 + 128, fma(load(TAG_F32, r3 + 128), c3, a32))
    store(r3 + 192, fma(load(TAG_F32, r3 + 192), c3, a33))


@jit
def outer_strip(
    tag: Any,
    a: int,
    a_step: int,
    b: NDArray[np.int64],
    offset: int,
    begin: int,
    end: int,
    c: int,
    factor: np.float32,
) -> None:
    """C = factor * C + Σ_k A[k] * B[k] for one row of 16 lanes: what `outer_tile` leaves over."""
    total = splat(np.float32(0))
    for k in range(begin, end):
        total = fma(load(tag, b[k] + offset), splat_at(a + k * a_step), total)
    store(c, fma(load(TAG_F32, c), splat(factor), total))
