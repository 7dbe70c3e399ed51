"""CRC-32C (Castagnoli) of blocks that travel: compiled by `warm_up`, or with the first use."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_TABLES = 8

Bytes = npt.NDArray[np.uint8]
Checksums = npt.NDArray[np.uint32]


@functools.cache
def _tables() -> npt.NDArray[np.uint32]:
    """Eight tables: with them eight bytes advance in one step."""
    tables = np.zeros((_TABLES, 256), np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        tables[0, byte] = value
    for index in range(1, _TABLES):
        before = tables[index - 1]
        tables[index] = tables[0][before & 0xFF] ^ (before >> np.uint32(8))
    return tables


@functools.cache
def _compiled() -> Callable[[Bytes, npt.NDArray[np.uint32], Checksums], None]:
    # Not at the top: numba takes a second to import, and not everybody needs it.
    from kvplane.kernels.cpu.jit import jit

    def checksum(rows: Any, tables: Any, out: Any) -> None:
        length = rows.shape[1]
        for row in range(rows.shape[0]):
            crc = np.uint32(0xFFFFFFFF)
            end = length - length % 8
            for at in range(0, end, 8):
                low = crc ^ (
                    np.uint32(rows[row, at])
                    | np.uint32(rows[row, at + 1]) << np.uint32(8)
                    | np.uint32(rows[row, at + 2]) << np.uint32(16)
                    | np.uint32(rows[row, at + 3]) << np.uint32(24)
                )
                crc = (
                    tables[7, low & 0xFF]
                    ^ tables[6, (low >> np.uint32(8)) & 0xFF]
                    ^ tables[5, (low >> np.uint32(16)) & 0xFF]
                    ^ tables[4, low >> np.uint32(24)]
                    ^ tables[3, rows[row, at + 4]]
                    ^ tables[2, rows[row, at + 5]]
                    ^ tables[1, rows[row, at + 6]]
                    ^ tables[0, rows[row, at + 7]]
                )
            for at in range(end, length):
                crc = tables[0, (crc ^ rows[row, at]) & 0xFF] ^ (crc >> np.uint32(8))
            out[row] = crc ^ np.uint32(0xFFFFFFFF)

    return jit(checksum)


def crc32c(rows: Bytes) -> Checksums:
    """Checksums of rows of bytes, shape [n, bytes] → [n]."""
    out = np.zeros(len(rows), np.uint32)
    _compiled()(np.ascontiguousarray(rows), _tables(), out)
    return out


def warm_up() -> None:
    """Compile now and not on the device thread in the middle of everybody's steps."""
    crc32c(np.zeros((1, _TABLES), np.uint8))
