"""A layer on a CUDA device: what its kernels need beyond the tensors, checked when the pool is made."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvplane.kernels.cuda.runtime import check_cache
from kvplane.kernels.errors import StrideError, UnsupportedFeatureError

if TYPE_CHECKING:
    from kvplane.kernels.paged_kv import PagedKv

MAX_SEGMENTS = 4
# The kernels are compiled for strides and bases that are multiples of 16 elements. For others the compiler would give
# up asynchronous copies of 16 bytes, in silence, so they are refused.
STRIDE_ELEMENTS = 16
_BEYOND_ALL_BLOCKS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class CudaLayer:
    """Segments and scales on the device, strides in elements."""

    key_segments: Tensor  # int64 [MAX_SEGMENTS, 2]: first block, elements to add
    value_segments: Tensor
    addresses: Tensor  # int64 [segments, 10], `PagedKv.address_table`
    num_segments: int
    key_scales: Tensor  # float32 [kv heads]
    value_scales: Tensor
    key_strides: tuple[int, int, int]
    """Block, head, slot."""
    value_strides: tuple[int, int, int]


def prepare_layer(layer: "PagedKv") -> CudaLayer:
    """The device's part of a layer.

    Raises UnsupportedFeatureError for what the launch table has not, StrideError for what would lose the fast path.
    """
    geometry = layer.geometry
    check_cache(geometry.device, geometry.dtype, geometry.head_dim)
    if len(layer.keys) > MAX_SEGMENTS:
        raise UnsupportedFeatureError("keys", f"{len(layer.keys)} segments, on CUDA at most {MAX_SEGMENTS} are built")
    for name, segments in (("keys", layer.keys), ("values", layer.values)):
        strides = segments[0].stride()[:3]
        if any(stride % STRIDE_ELEMENTS for stride in strides):
            raise StrideError(name, f"on CUDA strides must be multiples of {STRIDE_ELEMENTS} elements, got {strides}")
        size = segments[0].element_size()
        apart = [segment.data_ptr() - segments[0].data_ptr() for segment in segments]
        if any(distance % (STRIDE_ELEMENTS * size) for distance in apart):
            raise StrideError(name, f"segments must lie multiples of {STRIDE_ELEMENTS * size} bytes apart")
    device = geometry.device
    key_strides, value_strides = ((s[0].stride(0), s[0].stride(1), s[0].stride(2)) for s in (layer.keys, layer.values))
    return CudaLayer(
        key_segments=torch.from_numpy(_segments(layer.keys)).to(device),
        value_segments=torch.from_numpy(_segments(layer.values)).to(device),
        addresses=torch.from_numpy(layer.address_table).to(device),
        num_segments=len(layer.keys),
        key_scales=_scales(layer.key_scale, layer),
        value_scales=_scales(layer.value_scale, layer),
        key_strides=key_strides,
        value_strides=value_strides,
    )


def _segments(segments: tuple[Tensor, ...]) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    table = np.zeros((MAX_SEGMENTS, 2), np.int64)
    table[:, 0] = _BEYOND_ALL_BLOCKS
    first_block = 0
    for row, segment in enumerate(segments):
        apart = (segment.data_ptr() - segments[0].data_ptr()) // segment.element_size()
        table[row] = first_block, apart - first_block * segment.stride(0)
        first_block += int(segment.shape[0])
    return table


def _scales(scale: Tensor | None, layer: "PagedKv") -> Tensor:
    geometry = layer.geometry
    if scale is None:
        return torch.ones(geometry.num_kv_heads, dtype=torch.float32, device=geometry.device)
    return scale
