"""What a layer means on each shard's mapped memory: found once per compute access, used by every plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.client.compute.memory import MappedShard
from kvplane.client.compute.topology import Part, Topology
from kvplane.kernels import KvGeometry, PagedKv


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What is to be done for one layer on one shard's memory; made once per compute access."""

    blocks: PagedKv
    geometry: int
    """Equal for equal geometries: cheap to look up by."""
    kv_heads: slice | None
    """None: all."""
    query_heads: slice | None
    """None: all."""
    attends: bool
    num_query_heads: int
    """Query heads that the kernel plan is for."""


class Works:
    """All of it, by query heads and layer."""

    def __init__(self, topology: Topology, shards: Sequence[MappedShard]) -> None:
        self._topology = topology
        self._shards = shards
        self._found: dict[tuple[int, int], tuple[Work, ...]] = {}
        self._geometries: dict[KvGeometry, int] = {}

    def of(self, layer: int, num_query_heads: int) -> tuple[Work, ...]:
        """One per shard that holds the layer. Raises `InvalidArgumentError` for a layer that the pool has not."""
        found = self._found.get((layer, num_query_heads))
        if found is None:
            parts = self._topology.parts(layer, num_query_heads)
            found = tuple(self._work(layer, part, num_query_heads) for part in parts)
            self._found[layer, num_query_heads] = found
        return found

    def forget(self) -> None:
        """Drop the views into the shards."""
        self._found.clear()

    def _work(self, layer: int, part: Part, num_query_heads: int) -> Work:
        blocks = self._shards[part.shard].layers[layer]
        whole = part.kv_heads == slice(0, self._topology.num_kv_heads) and part.num_query_heads == num_query_heads
        return Work(
            blocks,
            self._geometries.setdefault(blocks.geometry, len(self._geometries)),
            None if whole else part.kv_heads,
            None if whole else part.query_heads,
            part.query_heads is not None,
            part.num_query_heads,
        )
