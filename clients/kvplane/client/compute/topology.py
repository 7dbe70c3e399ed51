"""Which shard holds which heads of which layers, and so which part of a tensor goes where."""

import functools
from dataclasses import dataclass

import torch

from kvplane.client.compute.dtypes import torch_dtype
from kvplane.v1 import types_pb2
from kvplane.wire.errors import InvalidArgumentError, KvplaneError, UnavailableError, UnsupportedFeatureError
from kvplane.wire.packed import unpack_u32


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard does of a layer: views of the whole tensors, never copies."""

    shard: int
    """Index into `Topology.shards`."""
    kv_heads: slice
    query_heads: slice | None
    """Heads it attends with; None where another shard with the same KV heads does."""
    num_query_heads: int
    """Query heads that its kernel plan is made for."""


class Topology:
    """A pool's shape and its shards. Raises `UnsupportedFeatureError` for pools of several groups or of tensors besides
    keys and values, `UnavailableError` when a layer's heads are not all held by some shard."""

    def __init__(self, pool: types_pb2.Pool) -> None:
        if len(pool.groups) != 1:
            raise UnsupportedFeatureError(f"pool {pool.pool_id} has {len(pool.groups)} cache groups, 1 is built")
        group = pool.groups[0]
        roles = tuple(tensor.role for tensor in group.tensors)
        if roles != (types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE):
            raise UnsupportedFeatureError(f"pool {pool.pool_id} stores tensors besides one of keys and one of values")
        self.num_kv_heads, self.head_dim = (int(size) for size in group.tensors[0].shape)
        self.dtype: torch.dtype = torch_dtype(group.tensors[0].dtype)
        self.block_tokens = int(group.block_tokens)
        self.window_tokens: int | None = None
        if group.WhichOneof("kind") == "sliding_window":
            self.window_tokens = int(group.sliding_window.window_tokens)
        self.layers: tuple[int, ...] = tuple(unpack_u32("groups[0].layers", group.layers).tolist())
        self.shards: tuple[types_pb2.Shard, ...] = tuple(sorted(pool.shards, key=lambda shard: shard.rank))
        self._holders = {layer: self._holders_of(layer) for layer in self.layers}
        self._parts = functools.cache(self._compute_parts)

    def held_layers(self, shard: int) -> list[int]:
        """Layers that a shard holds, ascending."""
        return [layer for layer in self.layers if shard in self._holders[layer]]

    def parts(self, layer: int, num_query_heads: int) -> tuple[Part, ...]:
        """Every shard's part of a layer. Raises `InvalidArgumentError` for a layer that the pool has not."""
        holders = self._holders.get(layer)
        if holders is None:
            raise InvalidArgumentError.of("layer", f"{layer} is not one of the pool's {len(self.layers)}")
        return self._parts(holders, num_query_heads)

    def check_query_heads(self, num_query_heads: int) -> None:
        """Raises `InvalidArgumentError` unless all KV heads have equally many query heads."""
        if num_query_heads < 1 or num_query_heads % self.num_kv_heads:
            limit = f"a multiple of the pool's {self.num_kv_heads} KV heads expected"
            raise InvalidArgumentError.of("num_query_heads", f"{limit}, got {num_query_heads}")

    def _holders_of(self, layer: int) -> tuple[int, ...]:
        holders = []
        for index, shard in enumerate(self.shards):
            layers = shard.spec.layers
            if not shard.spec.HasField("layers") or layers.first <= layer < layers.first + layers.count:
                holders.append(index)
        covered = 0
        for first, count in sorted({self._heads(index) for index in holders}):
            if first == covered:
                covered = first + count
        if covered != self.num_kv_heads:
            raise UnavailableError(
                f"KV heads from {covered} on of layer {layer} are held by no shard", retry_after_seconds=0.5
            )
        return tuple(holders)

    def _heads(self, shard: int) -> tuple[int, int]:
        spec = self.shards[shard].spec
        return int(spec.first_kv_head), int(spec.num_kv_heads)

    def _compute_parts(self, holders: tuple[int, ...], num_query_heads: int) -> tuple[Part, ...]:
        per_kv_head = num_query_heads // self.num_kv_heads
        parts = []
        for heads in sorted({self._heads(index) for index in holders}):
            first, count = heads
            same = [index for index in holders if self._heads(index) == heads]
            share = per_kv_head // len(same)
            for place, index in enumerate(same):
                queries: slice | None = slice(first * per_kv_head, (first + count) * per_kv_head)
                number = count * per_kv_head
                if len(same) > 1 and count == 1 and share * len(same) == per_kv_head:
                    # Replicas of one head divide its query heads; all of them write.
                    begin = first * per_kv_head + place * share
                    queries, number = slice(begin, begin + share), share
                elif place:
                    queries = None
                parts.append(Part(index, slice(first, first + count), queries, number))
        return tuple(parts)


def at_shard(error: KvplaneError, shard: types_pb2.Shard) -> KvplaneError:
    """The same error, saying which shard it is about."""
    error.metadata.setdefault("shard", str(shard.rank))
    error.message = f"shard {shard.rank} at {shard.address}: {error.message}"
    error.args = (error.message,)
    return error
