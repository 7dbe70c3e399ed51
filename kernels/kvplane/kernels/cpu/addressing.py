"""From a position of a sequence to the bytes of its slot, inside compiled kernels."""

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.jit import jit

# Columns of `PagedKv.address_table`: one row per segment, everything in bytes but the block ids.
FIRST_BLOCK, END_BLOCK, KEY, VALUE = 0, 1, 2, 3
KEY_BLOCK, KEY_HEAD, KEY_SLOT = 4, 5, 6
VALUE_BLOCK, VALUE_HEAD, VALUE_SLOT = 7, 8, 9


@jit
def address_of(array: NDArray[np.generic]) -> int:
    """The byte address of an array's first element."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


@jit
def segment_of(segments: NDArray[np.int64], block: int) -> int:
    """The row of the segment that holds a block; plans have checked that there is one."""
    segment = 0
    while block >= segments[segment, 1]:
        segment += 1
    return segment


@jit
def fill_addresses(
    segments: NDArray[np.int64],
    blocks: NDArray[np.int32],
    block_size: int,
    start: int,
    end: int,
    keys: NDArray[np.int64],
    values: NDArray[np.int64],
) -> None:
    """Byte addresses (KV head 0) of the slots of positions start, start + 1, …, for as many as `keys` holds.

    Positions from `end` on repeat the last one, so that reading ahead stays inside the sequence.
    """
    for i in range(keys.shape[0]):
        position = min(start + i, end - 1)
        block = int(np.int64(blocks[position // block_size]))
        slot = position % block_size
        segment = segment_of(segments, block)
        local = block - segments[segment, 0]
        keys[i] = segments[segment, 2] + local * segments[segment, 4] + slot * segments[segment, 6]
        values[i] = segments[segment, 3] + local * segments[segment, 7] + slot * segments[segment, 9]
