"""What a shard uploads of its directory, and what all shards of a pool agree on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvplane.cache.core import Survivors
from kvplane.v1 import registry_pb2
from kvplane.wire import directory
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.identity import DIGEST_BYTES
from kvplane.wire.packed import U32Array, U64Array, unpack_u32, unpack_u64

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Upload:
    """One shard's upload, until its last chunk has come."""

    num_blocks: int
    rows: directory.Rows = field(init=False)
    stamps: U64Array = field(init=False)
    hold_maps: list[registry_pb2.HoldMap] = field(default_factory=list)
    tables: dict[tuple[int, int], tuple[U32Array, U64Array]] = field(default_factory=dict)
    """Granted tables by session and sequence: ids and generations."""
    num_rows: int = 0
    num_stamps: int = 0

    def __post_init__(self) -> None:
        self.rows = np.zeros(self.num_blocks, directory.BLOCK_ROW)
        self.stamps = np.zeros(self.num_blocks, np.uint64)

    def add(self, chunk: registry_pb2.InventoryRequest) -> None:
        """Take a chunk. Raises `InvalidArgumentError` for one that does not fit the pool."""
        first = chunk.first_block
        if len(chunk.rows) % directory.BLOCK_ROW.itemsize:
            raise InvalidArgumentError.of("rows", "end inside a row")
        rows = np.frombuffer(chunk.rows, directory.BLOCK_ROW)
        stamps = unpack_u64("stamps", chunk.stamps)
        if first + max(len(rows), len(stamps)) > self.num_blocks:
            raise InvalidArgumentError.of("first_block", f"the chunk ends behind block {self.num_blocks - 1}")
        self.rows[first : first + len(rows)] = rows
        self.stamps[first : first + len(stamps)] = stamps
        self.num_rows += len(rows)
        self.num_stamps += len(stamps)
        self.hold_maps.extend(chunk.hold_maps)
        for table in chunk.granted_tables:
            if len(table.blocks) == 1:
                ids = unpack_u32("granted_tables.blocks", table.blocks[0].block_ids)
                generations = unpack_u64("granted_tables.blocks", table.blocks[0].generations, len(ids))
                self.tables[table.session_id, table.sequence_id] = ids, generations

    def granted(self, session_id: int, sequence_id: int, ids: U32Array, generations: U64Array) -> Mask:
        """Which entries of a table this shard has granted just so, shape [len(ids)]."""
        mine = self.tables.get((session_id, sequence_id))
        found = np.zeros(len(ids), np.bool_)
        if mine is not None:
            count = min(len(ids), len(mine[0]))
            found[:count] = (mine[0][:count] == ids[:count]) & (mine[1][:count] == generations[:count])
        return found

    def granted_any(self, session_id: int, ids: U32Array, generations: U64Array) -> Mask:
        """Which blocks this shard has granted to a session in whatever table, shape [len(ids)]."""
        newest = np.zeros(self.num_blocks, np.uint64)
        for (session, _), (table_ids, table_generations) in self.tables.items():
            if session == session_id:
                inside = table_ids < self.num_blocks
                named = table_ids[inside]
                newest[named] = np.maximum(newest[named], table_generations[inside])
        found: Mask = (newest[ids] == generations) & (generations != 0)
        return found


def survivors(uploads: Sequence[Upload], incarnation: int) -> Survivors:
    """What the shards agree on, before anything is allocated under `incarnation`."""
    first, *others = uploads
    rows = first.rows
    stamped, newest = first.stamps.copy(), first.stamps.copy()
    sealed = directory.sealed_mask(rows, first.stamps)
    for other in others:
        np.minimum(stamped, other.stamps, out=stamped)
        np.maximum(newest, other.stamps, out=newest)
        sealed &= directory.sealed_mask(other.rows, other.stamps)
        for name in ("generation", "group", "depth", "namespace_id", "digest", "parent"):
            sealed &= rows[name] == other.rows[name]
    # A generation of this start cannot be there yet; a shard that says so is not believed.
    sealed &= rows["generation"] < np.uint64(incarnation << 32)
    sealed &= rows["group"] == 0
    sealed[0] = False
    return Survivors(
        sealed,
        stamped,
        newest,
        _digests(rows, "digest"),
        _digests(rows, "parent"),
        rows["depth"].astype(np.uint32),
        rows["namespace_id"].astype(np.uint32),
    )


def unsound(upload: Upload, kept: Mask) -> tuple[U32Array, U64Array]:
    """Rows of a shard that are sealed and not kept: ids and generations, for VoidRows."""
    ids = np.flatnonzero(((upload.rows["flags"] & directory.SEALED) != 0) & ~kept)
    return ids.astype(np.uint32), upload.rows["generation"][ids].astype(np.uint64)


def _digests(rows: directory.Rows, name: str) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(rows[name]).view(np.uint8).reshape(-1, DIGEST_BYTES)
