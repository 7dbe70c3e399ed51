"""The block tensors of one layer, whatever their layout: views, strides and addresses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplane.kernels.backend import prepared_layer
from kvplane.kernels.errors import DtypeError, ShapeError, StrideError, UnsupportedFeatureError
from kvplane.kernels.quantise import QUANTISED_DTYPES, per_head

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of rows: queries, outputs, new keys and values. Caches may be quantised as well."""
CACHE_DTYPES = (*SUPPORTED_DTYPES, *QUANTISED_DTYPES)
MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 256
HEAD_DIM_MULTIPLE = 16
# Bases and strides that every backend's vector loads can rely on; a CUDA compiler emits asynchronous copies
# only for addresses it knows to be this aligned.
ALIGNMENT_BYTES = 16
NULL_BLOCK = 0


class Layout(Enum):
    """Order of the dimensions inside a block: H heads, N slots, D head dimension."""

    HND = "HND"
    NHD = "NHD"


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What all layers of a cache group have in common, and all that a plan has to know of them.

    `segment_blocks` counts the blocks of each segment; block ids run through the segments in order.
    Block 0 is the null block: never written, never read.
    """

    segment_blocks: tuple[int, ...]
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_blocks(self) -> int:
        """Blocks of all segments, the null block included."""
        return sum(self.segment_blocks)


@dataclass(frozen=True, slots=True, eq=False)
class PagedKv:
    """Keys and values of one layer, as views [blocks, kv_heads, block_size, head_dim], one per segment.

    Holds no memory of its own. Strides are free but for the last, which is 1; all segments share them.
    Build one with `of` or `interleaved`.

    `address_table` int64 [segments, 10] gives, in bytes: first block id, end block id, base of K, base of V,
    then the strides of block, head and slot for K and for V.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scale: Tensor | None  # float32 [kv_heads], of a quantised cache; None means 1
    value_scale: Tensor | None
    geometry: KvGeometry = field(init=False)
    address_table: NDArray[np.int64] = field(init=False)
    prepared: Any = field(init=False, repr=False)  # the backend's own: device copies

    def __post_init__(self) -> None:
        object.__setattr__(self, "geometry", _checked_geometry(self.keys, self.values))
        object.__setattr__(self, "address_table", _address_table(self.keys, self.values))
        facts = self.geometry
        for name, scale in (("key_scale", self.key_scale), ("value_scale", self.value_scale)):
            object.__setattr__(self, name, per_head(name, scale, facts.dtype, facts.num_kv_heads, facts.device))
        object.__setattr__(self, "prepared", prepared_layer(self))

    @classmethod
    def of(
        cls,
        keys: Tensor | Sequence[Tensor],
        values: Tensor | Sequence[Tensor],
        *,
        layout: Layout = Layout.HND,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> "PagedKv":
        """Wrap block tensors: one each, or one per segment.

        Shapes: [blocks, kv_heads, block_size, head_dim] for HND, [blocks, block_size, kv_heads, head_dim] for
        NHD. `key_scale` and `value_scale`, for float8_e4m3fn and int8: one number, or one per KV head; a value is what
        is stored times its scale.
        Raises ShapeError, DtypeError, StrideError or UnsupportedFeatureError.
        """
        segments_of_keys = (keys,) if isinstance(keys, Tensor) else tuple(keys)
        segments_of_values = (values,) if isinstance(values, Tensor) else tuple(values)
        for name, segments in (("keys", segments_of_keys), ("values", segments_of_values)):
            for segment in segments:
                if segment.dim() != 4:
                    raise ShapeError(name, f"4 dimensions expected, got shape {tuple(segment.shape)}")
        if layout is Layout.NHD:
            segments_of_keys = tuple(segment.transpose(1, 2) for segment in segments_of_keys)
            segments_of_values = tuple(segment.transpose(1, 2) for segment in segments_of_values)
        return cls(segments_of_keys, segments_of_values, key_scale, value_scale)

    @classmethod
    def interleaved(
        cls,
        blocks: Tensor | Sequence[Tensor],
        *,
        layout: Layout = Layout.HND,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> "PagedKv":
        """Wrap tensors whose block holds K, then V: [blocks, 2, …] with … as in `of`."""
        segments = (blocks,) if isinstance(blocks, Tensor) else tuple(blocks)
        for segment in segments:
            if segment.dim() != 5 or segment.shape[1] != 2:
                raise ShapeError("blocks", f"[blocks, 2, …] expected, got shape {tuple(segment.shape)}")
        return cls.of(
            [s[:, 0] for s in segments],
            [s[:, 1] for s in segments],
            layout=layout,
            key_scale=key_scale,
            value_scale=value_scale,
        )


def _checked_geometry(keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> KvGeometry:
    if not keys or len(keys) != len(values):
        raise ShapeError("values", f"as many segments as keys expected, got {len(values)} for {len(keys)}")
    first = keys[0]
    _, num_kv_heads, block_size, head_dim = first.shape
    if first.dtype not in CACHE_DTYPES:
        raise UnsupportedFeatureError("keys.dtype", f"{first.dtype} is not one of {CACHE_DTYPES}")
    if not HEAD_DIM_MULTIPLE <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        raise ShapeError("head_dim", f"a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM} expected, got {head_dim}")
    if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ShapeError("block_size", f"a power of two up to {MAX_BLOCK_SIZE} expected, got {block_size}")
    if num_kv_heads < 1:
        raise ShapeError("num_kv_heads", "at least 1 expected, got 0")
    for name, role, reference in (("keys", keys, keys[0]), ("values", values, values[0])):
        for segment, key in zip(role, keys, strict=True):
            if segment.shape[1:] != first.shape[1:] or segment.shape[0] != key.shape[0]:
                raise ShapeError(name, f"shape {tuple(segment.shape)} does not fit keys {tuple(first.shape)}")
            if segment.dtype != first.dtype or segment.device != first.device:
                raise DtypeError(
                    name, f"{segment.dtype} on {segment.device} does not fit {first.dtype} on {first.device}"
                )
            _check_strides(name, segment, reference)
    return KvGeometry(
        tuple(int(segment.shape[0]) for segment in keys),
        block_size,
        num_kv_heads,
        head_dim,
        first.dtype,
        first.device,
    )


def _check_strides(name: str, segment: Tensor, reference: Tensor) -> None:
    if segment.stride() != reference.stride():
        raise StrideError(name, f"segments need equal strides, got {segment.stride()} and {reference.stride()}")
    if segment.stride(3) != 1:
        raise StrideError(name, f"the head dimension must be contiguous, its stride is {segment.stride(3)}")
    aligned = ALIGNMENT_BYTES // segment.element_size()
    if any(stride % aligned for stride in segment.stride()[:3]) or segment.data_ptr() % ALIGNMENT_BYTES:
        raise StrideError(
            name,
            f"base and strides must be multiples of {ALIGNMENT_BYTES} bytes, "
            f"got strides of {segment.stride()} elements",
        )


def _address_table(keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> NDArray[np.int64]:
    rows, first_block = [], 0
    for key, value in zip(keys, values, strict=True):
        strides = [stride * key.element_size() for tensor in (key, value) for stride in tensor.stride()[:3]]
        end_block = first_block + int(key.shape[0])
        rows.append([first_block, end_block, key.data_ptr(), value.data_ptr(), *strides])
        first_block = end_block
    return np.array(rows, np.int64)
