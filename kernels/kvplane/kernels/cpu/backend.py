"""The CPU backend: compiled kernels over plain host memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplane.kernels.cpu import blocks as block_kernels
from kvplane.kernels.cpu.merge import merge_partials
from kvplane.kernels.cpu.narrow import attend_narrow
from kvplane.kernels.cpu.simd import HAS_BF16_DOT, TAG_BF16, TAG_E4M3, TAG_F16, TAG_F32, TAG_INT8
from kvplane.kernels.cpu.threads import run_on_all
from kvplane.kernels.cpu.wide import attend_wide
from kvplane.kernels.cpu.work import CpuWork, prepare
from kvplane.kernels.quantise import QUANTISED_DTYPES, quantised

if TYPE_CHECKING:
    from kvplane.kernels.paged_kv import PagedKv
    from kvplane.kernels.planning import AttentionPlan

STORAGE_TAGS: dict[torch.dtype, Any] = {
    torch.float32: TAG_F32,
    torch.bfloat16: TAG_BF16,
    torch.float16: TAG_F16,
    torch.float8_e4m3fn: TAG_E4M3,
    torch.int8: TAG_INT8,
}
# Waking another thread costs about as much as moving this many bytes.
_BYTES_WORTH_A_THREAD = 256 * 1024


def _counter() -> NDArray[np.int64]:
    return np.zeros(1, np.int64)


def _per_head(values: Tensor | None) -> NDArray[np.float32]:
    return np.empty(0, np.float32) if values is None else values.numpy()


def _scales(scales: Tensor | None, layer: "PagedKv") -> NDArray[np.float32]:
    return np.ones(layer.geometry.num_kv_heads, np.float32) if scales is None else scales.numpy()


def _useful_threads(moved_bytes: int) -> int:
    return 1 + moved_bytes // _BYTES_WORTH_A_THREAD


class CpuBackend:
    """Stateless; safe under any number of callers. Results do not depend on the number of threads."""

    def prepare_layer(self, layer: "PagedKv") -> None:
        """Nothing: kernels take `PagedKv.address_table` as it is."""

    def prepare(self, plan: "AttentionPlan") -> CpuWork:
        """Work list and workspace."""
        return prepare(plan)

    def attend(self, plan: "AttentionPlan", query: Tensor, layer: "PagedKv", out: Tensor, lse: Tensor) -> None:
        """Partial results of all items, then one merge per row."""
        work: CpuWork = plan.work
        geometry = plan.geometry
        size = geometry.dtype.itemsize
        slot_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * size
        useful = _useful_threads(work.attended_tokens * slot_bytes)
        dot = HAS_BF16_DOT and query.dtype == geometry.dtype == torch.bfloat16
        with plan.lock:
            queries = query.detach().to(torch.float32).contiguous().numpy()
            result = lse.numpy() if lse.is_contiguous() else np.empty(lse.shape, np.float32)
            for kernel, items in ((attend_wide, work.wide), (attend_narrow, work.narrow)):
                if len(items):
                    self._run_items(kernel, plan, layer, items, queries, dot, useful)
            counter, sinks = _counter(), _per_head(plan.sinks)
            run_on_all(
                lambda: merge_partials(
                    work.tokens, counter, work.partial_output, work.partial_lse, sinks, work.output, result
                ),
                _useful_threads(work.partial_output.nbytes),
            )
            out.copy_(torch.from_numpy(work.output))
            if not lse.is_contiguous():
                lse.copy_(torch.from_numpy(result))

    def _run_items(
        self,
        kernel: Callable[..., None],
        plan: "AttentionPlan",
        layer: "PagedKv",
        items: NDArray[np.int64],
        queries: NDArray[np.float32],
        dot: bool,
        useful: int,
    ) -> None:
        work: CpuWork = plan.work
        arguments = (
            STORAGE_TAGS[plan.geometry.dtype],
            plan.geometry.dtype.itemsize,
            dot,
            layer.address_table,
            plan.block_tables,
            plan.geometry.block_size,
            items,
            _counter(),
            work.members,
            work.tokens,
            queries,
            plan.group_size,
            np.float32(plan.scale),
            np.float32(plan.soft_cap or 0),
            _per_head(plan.alibi_slopes),
            _scales(layer.key_scale, layer),
            _scales(layer.value_scale, layer),
            work.partial_output,
            work.partial_lse,
        )
        run_on_all(lambda: kernel(*arguments), min(useful, len(items)))

    def write(self, plan: "AttentionPlan", key: Tensor, value: Tensor, layer: "PagedKv") -> None:
        """Copy rows to slots, quantised where the cache is."""
        if plan.geometry.dtype in QUANTISED_DTYPES:
            rows = plan.num_tokens
            key = quantised(key[:rows], layer.key_scale, plan.geometry.dtype)
            value = quantised(value[:rows], layer.value_scale, plan.geometry.dtype)
        size = plan.geometry.dtype.itemsize
        row_bytes = plan.geometry.head_dim * size
        arguments = (
            layer.address_table,
            plan.geometry.block_size,
            plan.slots,
            _counter(),
            plan.geometry.num_kv_heads,
            row_bytes,
            key.data_ptr(),
            key.stride(0) * size,
            key.stride(1) * size,
            value.data_ptr(),
            value.stride(0) * size,
            value.stride(1) * size,
        )
        moved = 2 * len(plan.slots) * plan.geometry.num_kv_heads * row_bytes
        run_on_all(lambda: block_kernels.write_slots(*arguments), _useful_threads(moved))

    def copy_blocks(self, layer: "PagedKv", sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """Gather all, then scatter all: a block may be source and destination at once."""
        shape = _canonical_shape(layer, len(sources))
        key, value = (torch.empty(shape, dtype=layer.geometry.dtype) for _ in range(2))
        self.gather_blocks(layer, sources, key, value)
        self.scatter_blocks(layer, destinations, key, value)

    def gather_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64], key: Tensor, value: Tensor) -> None:
        """Blocks to buffers."""
        self._move(layer, blocks, block_kernels.GATHER, key.data_ptr(), value.data_ptr())

    def scatter_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64], key: Tensor, value: Tensor) -> None:
        """Buffers to blocks."""
        self._move(layer, blocks, block_kernels.SCATTER, key.data_ptr(), value.data_ptr())

    def zero_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64]) -> None:
        """Zero bytes."""
        self._move(layer, blocks, block_kernels.ZERO, 0, 0)

    def checksum_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """One number per block."""
        sums = np.zeros(len(blocks), np.uint64)
        geometry = layer.geometry
        row_bytes = geometry.head_dim * geometry.dtype.itemsize
        counter = _counter()
        run_on_all(
            lambda: block_kernels.checksum(
                layer.address_table,
                geometry.block_size,
                blocks,
                counter,
                geometry.num_kv_heads,
                row_bytes,
                sums,
            ),
            _useful_threads(_bytes_of(layer, len(blocks))),
        )
        return sums

    def _move(self, layer: "PagedKv", blocks: NDArray[np.int64], operation: int, key: int, value: int) -> None:
        geometry = layer.geometry
        row_bytes = geometry.head_dim * geometry.dtype.itemsize
        arguments = (
            layer.address_table,
            geometry.block_size,
            blocks,
            _counter(),
            geometry.num_kv_heads,
            row_bytes,
            operation,
            key,
            value,
        )
        run_on_all(lambda: block_kernels.move_blocks(*arguments), _useful_threads(_bytes_of(layer, len(blocks))))


def _canonical_shape(layer: "PagedKv", blocks: int) -> tuple[int, int, int, int]:
    geometry = layer.geometry
    return blocks, geometry.block_size, geometry.num_kv_heads, geometry.head_dim


def _bytes_of(layer: "PagedKv", blocks: int) -> int:
    return 2 * int(np.prod(_canonical_shape(layer, blocks))) * layer.geometry.dtype.itemsize
