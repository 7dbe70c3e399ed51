"""Moving bytes: new keys and values into slots, whole blocks between each other and contiguous buffers.

Nothing here looks at a value, so one compilation serves all storage types.
"""

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.addressing import address_of, segment_of
from kvplane.kernels.cpu.jit import jit
from kvplane.kernels.cpu.memory import copy_bytes, fetch_add, load_word, zero_bytes

KEYS, VALUES = 0, 1  # role: which of a block's two halves
GATHER, SCATTER, ZERO = 0, 1, 2

_SLOTS_A_TURN = 16


@jit
def block_address(segments: NDArray[np.int64], block: int, role: int) -> int:
    """Byte address of head 0, slot 0 of a block's keys or values."""
    segment = segment_of(segments, block)
    local = block - segments[segment, 0]
    return segments[segment, 2 + role] + local * segments[segment, 4 + 3 * role]  # type: ignore[no-any-return]


@jit
def write_slots(
    segments: NDArray[np.int64],
    block_size: int,
    slots: NDArray[np.int64],
    counter: NDArray[np.int64],
    heads: int,
    row_bytes: int,
    key: int,
    key_row: int,
    key_head: int,
    value: int,
    value_row: int,
    value_head: int,
) -> None:
    """Copy row i of K and V (byte address, byte strides) to slots[i]; negative slots are skipped."""
    while True:
        begin = fetch_add(address_of(counter), _SLOTS_A_TURN)
        if begin >= slots.shape[0]:
            return
        for i in range(begin, min(begin + _SLOTS_A_TURN, slots.shape[0])):
            slot = slots[i]
            if slot < 0:
                continue
            block = slot // block_size
            offset = slot % block_size
            to_key = block_address(segments, block, KEYS) + offset * segments[0, 6]
            to_value = block_address(segments, block, VALUES) + offset * segments[0, 9]
            from_key = key + i * key_row
            from_value = value + i * value_row
            for head in range(heads):
                copy_bytes(to_key + head * segments[0, 5], from_key + head * key_head, row_bytes)
                copy_bytes(to_value + head * segments[0, 8], from_value + head * value_head, row_bytes)


@jit
def move_blocks(
    segments: NDArray[np.int64],
    block_size: int,
    blocks: NDArray[np.int64],
    counter: NDArray[np.int64],
    heads: int,
    row_bytes: int,
    operation: int,
    key: int,
    value: int,
) -> None:
    """Gather blocks into, or scatter them from, buffers [blocks, block_size, heads, row]; or zero them."""
    block_bytes = block_size * heads * row_bytes
    while True:
        i = fetch_add(address_of(counter), 1)
        if i >= blocks.shape[0]:
            return
        for role in range(2):
            in_block = block_address(segments, int(blocks[i]), role)
            in_buffer = (key if role == KEYS else value) + i * block_bytes
            head_stride = segments[0, 5 + 3 * role]
            slot_stride = segments[0, 6 + 3 * role]
            for slot in range(block_size):
                for head in range(heads):
                    a = in_block + slot * slot_stride + head * head_stride
                    b = in_buffer + (slot * heads + head) * row_bytes
                    if operation == GATHER:
                        copy_bytes(b, a, row_bytes)
                    elif operation == SCATTER:
                        copy_bytes(a, b, row_bytes)
                    else:
                        zero_bytes(a, row_bytes)


@jit
def checksum(
    segments: NDArray[np.int64],
    block_size: int,
    blocks: NDArray[np.int64],
    counter: NDArray[np.int64],
    heads: int,
    row_bytes: int,
    sums: NDArray[np.uint64],
) -> None:
    """Σ splitmix64(word + place * golden ratio) over a block's 64-bit words in canonical order, K before V.

    The sum commutes, so any number of threads of any device gets the same number; the place is mixed in, so
    words that trade places change it. (splitmix64: Steele, Lea and Flood, 2014.)
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    while True:
        i = fetch_add(address_of(counter), 1)
        if i >= blocks.shape[0]:
            return
        total = np.uint64(0)
        place = np.uint64(0)
        for role in range(2):
            base = block_address(segments, int(blocks[i]), role)
            for slot in range(block_size):
                for head in range(heads):
                    row = base + slot * segments[0, 6 + 3 * role] + head * segments[0, 5 + 3 * role]
                    for byte in range(0, row_bytes, 8):
                        place += np.uint64(1)
                        x = load_word(row + byte) + place * golden
                        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                        total += x ^ (x >> np.uint64(31))
        sums[i] = total
