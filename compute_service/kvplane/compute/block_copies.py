"""Copies between blocks of a pool, as they stand in grants."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvplane.compute.occupancy import Ids, Slots
from kvplane.v1 import types_pb2
from kvplane.wire.errors import InvalidArgumentError
from kvplane.wire.features import refuse
from kvplane.wire.packed import U64Array, unpack_u32, unpack_u64


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Slots of blocks to copy to slots of other blocks; arrays are parallel."""

    op_id: int
    source_ids: Ids
    source_generations: U64Array
    source_starts: Slots
    destination_ids: Ids
    destination_generations: U64Array
    destination_starts: Slots
    counts: Slots


def copy_of(transfer: types_pb2.Transfer, block_tokens: int, num_blocks: int) -> BlockCopy:
    """Decode a COPY. Raises `InvalidArgumentError`, `UnsupportedFeatureError` for other kinds and parts of layers."""
    if transfer.kind != types_pb2.TRANSFER_KIND_COPY:
        raise refuse(f"a transfer of kind {transfer.kind} on a shard", "copies.kind")
    if transfer.HasField("layers"):
        raise refuse("a copy of some layers", "copies.layers")
    sources, source_generations = blocks_of(transfer.source, "copies.source", num_blocks)
    destinations, generations = blocks_of(transfer.destination, "copies.destination", num_blocks)
    count = len(sources)
    if len(destinations) != count:
        raise InvalidArgumentError.of("copies.destination", f"has {len(destinations)} blocks for {count} sources")
    counts = np.full(count, block_tokens, np.int64)
    if transfer.slots:
        counts = unpack_u32("copies.slots", transfer.slots, count).astype(np.int64)
    starts = []
    for name in ("source_slots", "destination_slots"):
        packed: bytes = getattr(transfer, name)
        first = unpack_u32(f"copies.{name}", packed, count).astype(np.int64) if packed else np.zeros(count, np.int64)
        if (first + counts > block_tokens).any():
            raise InvalidArgumentError.of(f"copies.{name}", f"goes beyond the block's {block_tokens} slots")
        starts.append(first)
    return BlockCopy(
        transfer.op_id, sources, source_generations, starts[0], destinations, generations, starts[1], counts
    )


def blocks_of(lists: Iterable[types_pb2.BlockList], field: str, num_blocks: int) -> tuple[Ids, U64Array]:
    """Ids and generations of all lists. Raises `InvalidArgumentError` for blocks the pool has not, and for the null
    block; `UnsupportedFeatureError` for other groups and segments."""
    ids: list[Ids] = [np.zeros(0, np.int64)]
    generations: list[U64Array] = [np.zeros(0, np.uint64)]
    for each in lists:
        if each.segment or each.group:
            raise refuse("several segments and groups", field)
        some = unpack_u32(f"{field}.block_ids", each.block_ids).astype(np.int64)
        generations.append(unpack_u64(f"{field}.generations", each.generations, len(some)))
        bad = (some == 0) | (some >= num_blocks)
        if bad.any():
            raise InvalidArgumentError.of(f"{field}.block_ids", f"{some[bad.argmax()]} is not in 1..{num_blocks - 1}")
        ids.append(some)
    return np.concatenate(ids), np.concatenate(generations)
