"""Copies that steps ordered: a fork's partial tail goes into the child's own block before its first write."""

from collections.abc import Iterator, Sequence

from kvplane import kernels
from kvplane.client.compute.memory import MappedShard
from kvplane.client.values import BlockCopy


def run_copies(shards: Sequence[MappedShard], copies: Sequence[BlockCopy]) -> None:
    """Run copies in their order on all layers of all shards; whole blocks: slots behind `num_slots` hold nothing."""
    for batch in _independent(copies):
        sources = [copy.source_id for copy in batch]
        destinations = [copy.destination_id for copy in batch]
        for shard in shards:
            for blocks in shard.layers.values():
                kernels.copy_blocks(blocks, sources, destinations)


def _independent(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Runs of copies none of which reads or writes what an earlier one of the run has written."""
    batch: list[BlockCopy] = []
    written: set[int] = set()
    for copy in copies:
        if copy.source_id in written or copy.destination_id in written:
            yield batch
            batch, written = [], set()
        batch.append(copy)
        written.add(copy.destination_id)
    if batch:
        yield batch
