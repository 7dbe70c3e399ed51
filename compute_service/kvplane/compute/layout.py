"""Where the bytes of a pool lie on one shard: computed from groups, layout and shard, the same on every start."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from kvplane.compute.dtypes import torch_dtype
from kvplane.v1 import types_pb2
from kvplane.wire.errors import InvalidArgumentError, UnsupportedFeatureError
from kvplane.wire.features import refuse
from kvplane.wire.limits import BLOCK_TOKENS_MAX
from kvplane.wire.packed import pack_u64, unpack_u32

TENSOR_ALIGNMENT = 4096
"""Bytes that every tensor's base is a multiple of."""

ROLES = (types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE)
"""What a layer stores, in this order."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One layer's blocks of one role inside the pool's memory."""

    layer: int
    role: types_pb2.TensorRole.ValueType
    offset: int
    """First byte."""
    shape: tuple[int, ...]
    """Blocks first; the order of slots and heads is the layout's."""
    strides: tuple[int, ...]
    """Elements from one index to the next."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The part of a pool that one shard holds."""

    layers: tuple[int, ...]
    """Layers held here, counted over the whole model, ascending."""
    num_kv_heads: int
    """KV heads held here."""
    head_dim: int
    dtype: torch.dtype
    block_tokens: int
    window_tokens: int | None
    """None: full attention."""
    head_layout: types_pb2.HeadLayout.ValueType
    interleaved: bool
    """Whether a block's K and V lie beside each other."""

    @property
    def role_block_bytes(self) -> int:
        """Bytes of one block's keys (or values) in one layer."""
        return self.num_kv_heads * self.block_tokens * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and roles."""
        return len(self.layers) * len(ROLES) * self.role_block_bytes

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one block to the next in each tensor."""
        return self.role_block_bytes * (len(ROLES) if self.interleaved else 1)

    @property
    def fingerprint(self) -> str:
        """Names this layout in file names: memory of another one is never taken for ours."""
        return sha256(repr(self).encode()).hexdigest()[:16]

    def num_bytes(self, num_blocks: int) -> int:
        """Bytes of all block tensors."""
        tensors = len(self.layers) * (1 if self.interleaved else len(ROLES))
        return tensors * _aligned(num_blocks * self.block_stride_bytes)

    def places(self, num_blocks: int) -> Iterator[TensorPlace]:
        """Every tensor, layer by layer, keys before values."""
        inner = (self.block_tokens, self.num_kv_heads, self.head_dim)
        if self.head_layout == types_pb2.HEAD_LAYOUT_HND:
            inner = (self.num_kv_heads, self.block_tokens, self.head_dim)
        block_stride = self.block_stride_bytes // self.dtype.itemsize
        strides = (block_stride, inner[1] * inner[2], inner[2], 1)
        tensor_bytes = _aligned(num_blocks * self.block_stride_bytes)
        offset = 0
        for layer in self.layers:
            for index, role in enumerate(ROLES):
                inside = index * self.role_block_bytes if self.interleaved else index * tensor_bytes
                yield TensorPlace(layer, role, offset + inside, (num_blocks, *inner), strides)
            offset += tensor_bytes * (1 if self.interleaved else len(ROLES))

    def identity(self, tensor_parallel: int, pipeline_parallel: int) -> types_pb2.LayoutIdentity:
        """What is checked at registration."""
        return types_pb2.LayoutIdentity(
            head_layout=self.head_layout,
            interleaved_kv=self.interleaved,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            block_stride_bytes=pack_u64([self.block_stride_bytes] * len(ROLES)),
        )


def layout_of(
    groups: Sequence[types_pb2.GroupSpec],
    shard: types_pb2.ShardSpec,
    head_layout: types_pb2.HeadLayout.ValueType,
    interleaved: bool,
) -> PoolLayout:
    """The layout of a shard. Raises `InvalidArgumentError`, and `UnsupportedFeatureError` for what is not built:
    several groups, kinds besides full attention and sliding windows, tensors besides keys and values."""
    if len(groups) != 1:
        raise UnsupportedFeatureError(f"groups: {len(groups)} groups in one pool are not built, one is")
    group = groups[0]
    window = _window(group)
    tokens = group.block_tokens
    if not 1 <= tokens <= BLOCK_TOKENS_MAX or tokens & (tokens - 1):
        raise InvalidArgumentError.of(
            "groups[0].block_tokens", f"{tokens} is no power of two from 1 to {BLOCK_TOKENS_MAX}"
        )
    if head_layout not in (types_pb2.HEAD_LAYOUT_NHD, types_pb2.HEAD_LAYOUT_HND):
        raise InvalidArgumentError.of("layout.head_layout", "is not set")
    heads, head_dim, dtype = _tensors(group)
    held = shard.num_kv_heads
    if not held or shard.first_kv_head + held > heads:
        last = shard.first_kv_head + held
        raise InvalidArgumentError.of(
            "shard.num_kv_heads", f"heads {shard.first_kv_head} to {last} are not among {heads} heads"
        )
    layers = unpack_u32("groups[0].layers", group.layers)
    if not len(layers) or (np.diff(layers.astype(np.int64)) <= 0).any():
        raise InvalidArgumentError.of("groups[0].layers", "must be ascending, at least one")
    if shard.HasField("layers"):
        first = shard.layers.first
        layers = layers[(layers >= first) & (layers < first + shard.layers.count)]
        if not len(layers):
            raise InvalidArgumentError.of("shard.layers", "the shard holds no layer of the group")
    return PoolLayout(tuple(layers.tolist()), held, head_dim, dtype, tokens, window, head_layout, interleaved)


def _window(group: types_pb2.GroupSpec) -> int | None:
    kind = group.WhichOneof("kind")
    if kind == "full_attention":
        return None
    if kind == "sliding_window":
        if group.sliding_window.sink_tokens:
            raise refuse("window_sinks", "groups[0].sliding_window.sink_tokens")
        if not group.sliding_window.window_tokens:
            raise InvalidArgumentError.of("groups[0].sliding_window.window_tokens", "must be at least 1")
        return group.sliding_window.window_tokens
    raise refuse(kind or "a group without a kind", "groups[0].kind")


def _tensors(group: types_pb2.GroupSpec) -> tuple[int, int, torch.dtype]:
    """KV heads over all shards, head dimension and dtype."""
    if tuple(tensor.role for tensor in group.tensors) != ROLES:
        raise refuse("tensors besides one of keys and one of values", "groups[0].tensors")
    key, value = group.tensors
    if key.shape != value.shape or key.dtype != value.dtype or len(key.shape) != 2 or not all(key.shape):
        raise InvalidArgumentError.of("groups[0].tensors", "keys and values must have one shape [kv_heads, head_dim]")
    if key.per_block or value.per_block:
        raise refuse("tensors per block", "groups[0].tensors")
    return key.shape[0], key.shape[1], torch_dtype(key.dtype, "groups[0].tensors.dtype")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
