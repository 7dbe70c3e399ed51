"""The block directory: what a shard knows about its bytes, in shared memory beside them.

Its memory layout is part of the contract (docs/directory.md, golden bytes in `tests/contract/golden`), so that it
survives the process that wrote it and can be read by another. One file holds, in this order: a header of 4096
bytes, namespaces, sessions, processes, and one row per block. All integers are little-endian.

Crash consistency. A row is written in three stores: flags to 0, everything else, flags to SEALED. A writer that
dies in between leaves flags 0, so a torn row reads as unsealed. `row_check` covers the other fields, so that a
reader in another process that meets a write half done, or a stray write, reads it as unsealed too.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvplane.wire.identity import DIGEST_BYTES, ModelIdentity
from kvplane.wire.limits import NAME_BYTES

MAGIC = b"KVPLDIR\0"
VERSION = 1
HEADER_BYTES = 4096
MODEL_IDENTITY_BYTES = 1024
NAMESPACE_IDENTITY_BYTES = 1024

SEALED = np.uint16(1)
"""Flag of a row whose block is written, immutable, and carries the digest beside it."""

IN_USE = np.uint32(1)
"""Flag of a namespace, session or process row that holds one (`kvplane.wire.tables`)."""

HEADER = np.dtype(
    {
        "names": [
            "magic",
            "version",
            "header_bytes",
            "valid",
            "num_blocks",
            "pool_epoch",
            "boot_id",
            "incarnation",
            "block_tokens",
            "num_namespaces",
            "num_sessions",
            "num_processes",
            "row_bytes",
            "namespaces_offset",
            "sessions_offset",
            "processes_offset",
            "rows_offset",
            "model_slot",
            "model_lengths",
            "model_identities",
        ],
        "formats": [
            "S8", "<u4", "<u4", "<u4", "<u4", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4", "<u4", "<u4",
            "<u8", "<u8", "<u8", "<u8", "<u4", ("<u4", (2,)), (f"V{MODEL_IDENTITY_BYTES}", (2,)),
        ],
        "offsets": [0, 8, 12, 16, 20, 24, 32, 40, 44, 48, 52, 56, 60, 64, 72, 80, 88, 96, 100, 128],
        "itemsize": HEADER_BYTES,
    }
)  # fmt: skip

NAMESPACE_ROW = np.dtype(
    {
        "names": ["flags", "namespace_id", "version", "root", "tenant", "tenant_length", "identity_length", "identity"],
        "formats": ["<u4", "<u4", "<u8", f"V{DIGEST_BYTES}", f"V{NAME_BYTES}", "<u4", "<u4",
                    f"V{NAMESPACE_IDENTITY_BYTES}"],
        "offsets": [0, 4, 8, 16, 48, 304, 308, 320],
        "itemsize": 1344,
    }
)  # fmt: skip

SESSION_ROW = np.dtype(
    {
        "names": ["flags", "ttl_ms", "session_id", "lease_epoch", "last_grant", "mode", "fenced", "max_sequences",
                  "tenant_length", "tenant", "secret_sha256"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4", f"V{NAME_BYTES}",
                    f"V{DIGEST_BYTES}"],
        "offsets": [0, 4, 8, 16, 24, 32, 36, 40, 44, 48, 304],
        "itemsize": 384,
    }
)  # fmt: skip

PROCESS_ROW = np.dtype(
    {
        "names": ["flags", "rank", "session_id", "lease_epoch", "start_ticks", "pid", "hold_map"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 4, 8, 16, 24, 32, 36],
        "itemsize": 64,
    }
)

BLOCK_ROW = np.dtype(
    {
        "names": ["generation", "row_check", "filled", "flags", "group", "depth", "namespace_id", "checksum",
                  "digest", "parent"],
        "formats": ["<u8", "<u4", "<u2", "<u2", "<u4", "<u4", "<u4", "<u4", f"V{DIGEST_BYTES}", f"V{DIGEST_BYTES}"],
        "offsets": [0, 8, 12, 14, 16, 20, 24, 28, 32, 64],
        "itemsize": 96,
    }
)  # fmt: skip

Rows = npt.NDArray[np.void]
"""Structured rows of one of the types above."""

_ROW_WORDS = BLOCK_ROW.itemsize // 8
# An all-zero row must not pass: the sum starts with a constant.
_CHECK_START = np.uint64(0x6B76706C616E6531)
# Odd multipliers make every bit of every word count; the constants are those of splitmix64's increments.
_CHECK_FACTORS = (np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
# Word 1 holds row_check, filled and flags: only `filled` is covered.
_FILLED_MASK = np.uint64(0x0000FFFF00000000)


@dataclass(frozen=True, slots=True)
class DirectorySpec:
    """Size and identity of a directory."""

    num_blocks: int
    """Blocks, the null block included."""
    block_tokens: int
    model: ModelIdentity
    pool_epoch: int
    boot_id: int
    incarnation: int
    num_namespaces: int = 1024
    num_sessions: int = 1024
    num_processes: int = 4096

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """First bytes of namespaces, sessions, processes and rows."""
        namespaces = HEADER_BYTES
        sessions = namespaces + self.num_namespaces * NAMESPACE_ROW.itemsize
        processes = sessions + self.num_sessions * SESSION_ROW.itemsize
        rows = processes + self.num_processes * PROCESS_ROW.itemsize
        return namespaces, sessions, processes, -(-rows // 4096) * 4096

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole directory."""
        return self.offsets[3] + self.num_blocks * BLOCK_ROW.itemsize


@dataclass(frozen=True, slots=True)
class Directory:
    """Views into a directory's memory; writing to them writes to it."""

    header: Rows
    """Shape [1]."""
    namespaces: Rows
    sessions: Rows
    processes: Rows
    blocks: Rows
    """Shape [num_blocks]; row 0 belongs to the null block and stays zero."""

    @property
    def model_identity(self) -> bytes:
        """Encoded `ModelIdentity` of the pool."""
        slot = int(self.header["model_slot"][0]) & 1
        length = int(self.header["model_lengths"][0, slot])
        identity: bytes = self.header["model_identities"][0, slot].tobytes()
        return identity[:length]

    def put_model(self, identity: bytes) -> None:
        """Replace the model identity (weight update): the other slot is written first, then selected, so that a writer
        that dies leaves the old one. Raises `ValueError` when it does not fit."""
        if len(identity) > MODEL_IDENTITY_BYTES:
            raise ValueError(f"model identity has {len(identity)} bytes, at most {MODEL_IDENTITY_BYTES} fit")
        other = 1 - (int(self.header["model_slot"][0]) & 1)
        self.header["model_identities"][0, other] = np.void(identity.ljust(MODEL_IDENTITY_BYTES, b"\0"))
        self.header["model_lengths"][0, other] = len(identity)
        self.header["model_slot"][0] = other


def format_directory(buffer: memoryview, spec: DirectorySpec) -> Directory:
    """Write an empty directory into zeroed, writable memory of at least `spec.num_bytes`.

    `valid` is set last: memory whose writer died earlier is not taken for a directory. Raises `ValueError` when
    the buffer is too small or the model identity too long.
    """
    if len(buffer) < spec.num_bytes:
        raise ValueError(f"directory needs {spec.num_bytes} bytes, the memory has {len(buffer)}")
    header = np.frombuffer(buffer, HEADER, 1)
    namespaces, sessions, processes, rows = spec.offsets
    header["valid"] = 0
    for name, value in {
        "magic": MAGIC,
        "version": VERSION,
        "header_bytes": HEADER_BYTES,
        "num_blocks": spec.num_blocks,
        "pool_epoch": spec.pool_epoch,
        "boot_id": spec.boot_id,
        "incarnation": spec.incarnation,
        "block_tokens": spec.block_tokens,
        "num_namespaces": spec.num_namespaces,
        "num_sessions": spec.num_sessions,
        "num_processes": spec.num_processes,
        "row_bytes": BLOCK_ROW.itemsize,
        "namespaces_offset": namespaces,
        "sessions_offset": sessions,
        "processes_offset": processes,
        "rows_offset": rows,
        "model_slot": 1,
    }.items():
        header[name] = value
    directory = _views(buffer, header)
    directory.put_model(spec.model.encode())
    header["valid"] = 1
    return directory


def open_directory(buffer: memoryview) -> Directory:
    """Views into memory that holds a directory. Raises `ValueError` that says what is wrong: not a directory,
    another layout version, never finished or invalidated, cut short."""
    if len(buffer) < HEADER_BYTES:
        raise ValueError(f"{len(buffer)} bytes hold no directory header of {HEADER_BYTES}")
    header = np.frombuffer(buffer, HEADER, 1)
    if header["magic"][0] != MAGIC.rstrip(b"\0"):
        raise ValueError("memory holds no block directory")
    if header["version"][0] != VERSION or header["row_bytes"][0] != BLOCK_ROW.itemsize:
        raise ValueError(f"directory has layout version {header['version'][0]}, this is version {VERSION}")
    if not header["valid"][0]:
        raise ValueError("directory was invalidated or never finished")
    return _views(buffer, header)


def _views(buffer: memoryview, header: Rows) -> Directory:
    def view(name: str, dtype: np.dtype[np.void]) -> Rows:
        count = int(header[f"num_{name}"][0])
        offset = int(header["rows_offset" if name == "blocks" else f"{name}_offset"][0])
        if offset + count * dtype.itemsize > len(buffer):
            raise ValueError(f"directory's {name} end at byte {offset + count * dtype.itemsize} of {len(buffer)}")
        return np.frombuffer(buffer, dtype, count, offset)

    return Directory(
        header,
        view("namespaces", NAMESPACE_ROW),
        view("sessions", SESSION_ROW),
        view("processes", PROCESS_ROW),
        view("blocks", BLOCK_ROW),
    )


def row_checks(rows: Rows) -> npt.NDArray[np.uint32]:
    """Check words of rows of shape [n]: a multilinear hash of every field but `flags` and the check itself.

    It finds tears and stray writes; it is no defence against somebody who may write the memory.
    """
    words = np.ascontiguousarray(rows).view("<u8").reshape(-1, _ROW_WORDS)
    folded = words.copy()
    folded[:, 1] &= _FILLED_MASK
    folded ^= folded >> np.uint64(32)
    total: npt.NDArray[np.uint64] = (folded * _CHECK_FACTORS).sum(axis=1, dtype=np.uint64) + _CHECK_START
    return (total >> np.uint64(32)).astype(np.uint32)


def occupy(rows: Rows, block_ids: npt.NDArray[np.integer], generations: npt.NDArray[np.uint64], group: int) -> None:
    """Give blocks new occupants: unsealed, nothing filled. Comes before the first byte of the new content."""
    rows["flags"][block_ids] = 0
    rows["filled"][block_ids] = 0
    rows["group"][block_ids] = group
    rows["generation"][block_ids] = generations


def seal(rows: Rows, block_ids: npt.NDArray[np.integer], sealed: Rows) -> None:
    """Seal blocks with the values of `sealed`, rows of the same order; its check and flags are computed here.

    The caller has compared generations with rows and stamps before. Block ids must be distinct.
    """
    content = sealed.copy()
    content["row_check"] = row_checks(content)
    content["flags"] = 0
    rows["flags"][block_ids] = 0
    rows[block_ids] = content
    rows["flags"][block_ids] = SEALED


def void(rows: Rows, block_ids: npt.NDArray[np.integer]) -> None:
    """Unseal blocks; their bytes and generations stay."""
    rows["flags"][block_ids] = 0


def sealed_mask(rows: Rows, stamps: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which rows count: sealed, untorn, and written by the block's newest occupant. Shape [n]."""
    mask: npt.NDArray[np.bool_] = (rows["flags"] & SEALED) != 0
    mask &= (rows["generation"] == stamps) & (stamps != 0)
    mask &= rows["row_check"] == row_checks(rows)
    return mask
