"""Stamps and hold maps: what engines write into a shard's shared memory, and generations.

A stamp is the newest generation of a block, written before the first byte of a new occupant: an evicted digest can
come back only while nobody has touched its bytes. A hold map has a bit per block that an attached process may still
touch. Both have a header of 64 bytes (docs/directory.md).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STAMPS_MAGIC = b"KVPLSTMP"
HOLD_MAP_MAGIC = b"KVPLHOLD"
VERSION = 1
HEADER_BYTES = 64

COUNTER_BITS = 32
COUNTER_MAX = 2**COUNTER_BITS - 1
"""A block whose counter has reached this is retired."""

STAMPS_HEADER = np.dtype(
    {
        "names": ["magic", "version", "num_blocks", "pool_epoch"],
        "formats": ["S8", "<u4", "<u4", "<u8"],
        "offsets": [0, 8, 12, 16],
        "itemsize": HEADER_BYTES,
    }
)

HOLD_MAP_HEADER = np.dtype(
    {
        "names": [
            "magic",
            "version",
            "num_blocks",
            "session_id",
            "lease_epoch",
            "start_ticks",
            "pid",
            "rank",
        ],
        "formats": ["S8", "<u4", "<u4", "<u8", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 8, 12, 16, 24, 32, 40, 44],
        "itemsize": HEADER_BYTES,
    }
)


def generation(incarnation: int, counter: int) -> int:
    """Generation u64 of a block's occupant: incarnation u32 ‖ counter u32."""
    return incarnation << COUNTER_BITS | counter


def incarnation_of(generation: int) -> int:
    """Which start of the control plane a generation was given by."""
    return generation >> COUNTER_BITS


def stamps_bytes(num_blocks: int) -> int:
    """Bytes of a stamp array with its header."""
    return HEADER_BYTES + 8 * num_blocks


def format_stamps(buffer: memoryview, num_blocks: int, pool_epoch: int) -> npt.NDArray[np.uint64]:
    """Write an empty stamp array into zeroed memory and return it, shape [num_blocks]."""
    header = np.frombuffer(buffer, STAMPS_HEADER, 1)
    header["version"], header["num_blocks"], header["pool_epoch"] = VERSION, num_blocks, pool_epoch
    header["magic"] = STAMPS_MAGIC
    return open_stamps(buffer)


def set_epoch(buffer: memoryview, pool_epoch: int) -> None:
    """Store a new epoch of the pool in the header of a stamp array."""
    np.frombuffer(buffer, STAMPS_HEADER, 1)["pool_epoch"] = pool_epoch


def open_stamps(buffer: memoryview) -> npt.NDArray[np.uint64]:
    """View of shape [num_blocks]. Raises `ValueError` when the memory holds no stamps or is cut short."""
    count = _open(buffer, STAMPS_HEADER, STAMPS_MAGIC, "stamps")
    if len(buffer) < stamps_bytes(count):
        raise ValueError(f"stamps of {count} blocks need {stamps_bytes(count)} bytes, not {len(buffer)}")
    return np.frombuffer(buffer, "<u8", count, HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class HoldMapOwner:
    """The process whose hold map it is."""

    session_id: int
    lease_epoch: int
    pid: int
    start_ticks: int
    """Start time of the process in clock ticks since boot: a process id alone is used again."""
    rank: int


def hold_map_bytes(num_blocks: int) -> int:
    """Bytes of a hold map with its header: whole 64-byte lines."""
    return HEADER_BYTES + -(-num_blocks // 512) * 64


def format_hold_map(buffer: memoryview, num_blocks: int, owner: HoldMapOwner) -> npt.NDArray[np.uint8]:
    """Write an empty hold map into zeroed memory and return its bits, shape [ceil(num_blocks / 8)]."""
    header = np.frombuffer(buffer, HOLD_MAP_HEADER, 1)
    header["version"], header["num_blocks"] = VERSION, num_blocks
    for name in ("session_id", "lease_epoch", "start_ticks", "pid", "rank"):
        header[name] = getattr(owner, name)
    header["magic"] = HOLD_MAP_MAGIC
    return open_hold_map(buffer)


def open_hold_map(buffer: memoryview) -> npt.NDArray[np.uint8]:
    """Bits of shape [ceil(num_blocks / 8)], least significant bit first. Raises `ValueError` like `open_stamps`."""
    count = _open(buffer, HOLD_MAP_HEADER, HOLD_MAP_MAGIC, "a hold map")
    if len(buffer) < hold_map_bytes(count):
        raise ValueError(f"hold map of {count} blocks needs {hold_map_bytes(count)} bytes, not {len(buffer)}")
    return np.frombuffer(buffer, np.uint8, -(-count // 8), HEADER_BYTES)


def held_blocks(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Ids of the blocks whose bits are set, ascending."""
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def _open(buffer: memoryview, dtype: np.dtype[np.void], magic: bytes, what: str) -> int:
    if len(buffer) < HEADER_BYTES:
        raise ValueError(f"{len(buffer)} bytes hold no header of {HEADER_BYTES}")
    header = np.frombuffer(buffer, dtype, 1)
    if header["magic"][0] != magic:
        raise ValueError(f"memory does not hold {what}")
    if header["version"][0] != VERSION:
        raise ValueError(f"{what}: layout version {header['version'][0]}, this is version {VERSION}")
    return int(header["num_blocks"][0])
