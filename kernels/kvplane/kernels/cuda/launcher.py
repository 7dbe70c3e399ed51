"""From plans, layers and tensors to launches of the Triton kernels: the one place that knows their arguments.

A `Launcher` is called with a kernel, its grid, its arguments and its constants. The device's own starts the kernel; the
ahead-of-time check passes one that only compiles, so that what it compiles is what is launched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvplane.kernels.cuda import launch_table
from kvplane.kernels.cuda.attend_kernel import attend_items
from kvplane.kernels.cuda.launch_table import AttendLaunch, MergeLaunch, WriteLaunch
from kvplane.kernels.cuda.layer import CudaLayer
from kvplane.kernels.cuda.merge_kernel import merge_partials
from kvplane.kernels.cuda.write_kernel import write_slots

if TYPE_CHECKING:
    from kvplane.kernels.cuda.work import CudaWork

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
"""Kernel, grid, arguments, constants."""

ALIGNMENT_BYTES = 16
_STRIDE_ELEMENTS = 16


def start(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch on the current device and stream."""
    kernel[grid](*arguments, **constants)


def is_aligned(rows: Tensor) -> bool:
    """Whether rows [tokens, heads, head_dim] may be passed as they are: as the kernels were compiled for."""
    strides = (_token_stride(rows), _head_stride(rows))
    return rows.data_ptr() % ALIGNMENT_BYTES == 0 and not any(stride % _STRIDE_ELEMENTS for stride in strides)


# torch lets the stride of a dimension of size 1 be anything
def _token_stride(rows: Tensor) -> int:
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1] * rows.shape[2]


def _head_stride(rows: Tensor) -> int:
    return rows.stride(1) if rows.shape[1] > 1 else rows.shape[2]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch's launches have in common."""

    heads: int
    group: int
    block_size: int
    head_dim: int
    scale: float
    soft_cap: float
    """0: none."""


def attend(
    launch: Launcher,
    entry: AttendLaunch,
    shape: Shape,
    work: "CudaWork",
    layer: CudaLayer,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    upcast: bool,
) -> None:
    """Narrow or wide items of a work list."""
    items = work.wide if entry.wide else work.narrow
    constants = entry.constants
    launch(
        attend_items,
        (items.shape[0], shape.heads // shape.group),
        (
            query,
            keys,
            values,
            out,
            lse,
            work.partial_out,
            work.partial_lse,
            items,
            work.members,
            work.tokens,
            work.tables,
            layer.key_segments,
            layer.value_segments,
            layer.key_scales,
            layer.value_scales,
            work.heads.slopes,
            work.heads.sinks,
            shape.scale,
            shape.soft_cap,
            _token_stride(query),
            _head_stride(query),
            _token_stride(out),
            _head_stride(out),
            *layer.key_strides,
            *layer.value_strides,
            lse.stride(0),
            lse.stride(1),
            work.room.table_width,
            shape.group,
            shape.heads,
            shape.block_size.bit_length() - 1,
        ),
        {
            "HEAD_DIM": shape.head_dim,
            "PADDED_DIM": launch_table.padded(shape.head_dim),
            "ROWS": constants.rows,
            "TILE": constants.tile,
            "GENERAL": entry.general,
            "EXACT": entry.query == torch.float32,
            "UPCAST": upcast,
            "num_warps": constants.num_warps,
            "num_stages": constants.num_stages,
        },
    )


def merge(launch: Launcher, entry: MergeLaunch, shape: Shape, work: "CudaWork", out: Tensor, lse: Tensor) -> None:
    """Partial results of all tokens."""
    launch(
        merge_partials,
        (work.room.tokens, shape.heads),
        (
            work.partial_out,
            work.partial_lse,
            work.tokens,
            work.heads.sinks,
            out,
            lse,
            _token_stride(out),
            _head_stride(out),
            lse.stride(0),
            lse.stride(1),
            shape.heads,
            shape.head_dim,
        ),
        {
            "PADDED_DIM": entry.padded_dim,
            "SPLITS": launch_table.MERGE_SPLITS,
            "num_warps": launch_table.SMALL_WARPS,
        },
    )


def write(
    launch: Launcher,
    entry: WriteLaunch,
    slots: Tensor,
    layer: CudaLayer,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Rows of keys and values to their slots; `keys` and `values` are [blocks, kv_heads, block_size, head_dim]."""
    _, kv_heads, block_size, head_dim = keys.shape
    launch(
        write_slots,
        (slots.shape[0], -(-kv_heads // launch_table.WRITE_HEADS)),
        (
            key,
            value,
            keys,
            values,
            slots,
            layer.key_segments,
            layer.value_segments,
            layer.key_scales,
            layer.value_scales,
            _token_stride(key),
            _head_stride(key),
            _token_stride(value),
            _head_stride(value),
            *layer.key_strides,
            *layer.value_strides,
            kv_heads,
            head_dim,
            block_size.bit_length() - 1,
        ),
        {
            "PADDED_DIM": entry.padded_dim,
            "HEADS": launch_table.WRITE_HEADS,
            "QUANTISED": entry.cache in launch_table.QUANTISED,
            "num_warps": launch_table.SMALL_WARPS,
        },
    )
