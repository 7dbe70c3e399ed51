"""The CUDA backend. Everything is launched on torch's current stream and nothing waits for it, but for checksums."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplane.kernels.cuda import launch_table, launcher
from kvplane.kernels.cuda.launch_table import AttendLaunch, MergeLaunch, WriteLaunch
from kvplane.kernels.cuda.launcher import Launcher, Shape
from kvplane.kernels.cuda.layer import CudaLayer, prepare_layer
from kvplane.kernels.cuda.staging import to_device
from kvplane.kernels.cuda.work import CudaWork, lay_out_on_host, place_on_device
from kvplane.kernels.errors import DtypeError

if TYPE_CHECKING:
    from kvplane.kernels.paged_kv import PagedKv
    from kvplane.kernels.planning import AttentionPlan

RawLauncher = Callable[[str, tuple[int, int], int, tuple[Any, ...]], None]
"""Name of a kernel of blocks.cu, grid, threads, arguments."""

THREADS = 256
_GATHER, _SCATTER, _ZERO = range(3)


class CudaBackend:
    """Stateless. A plan's workspace serves one stream at a time; calls on one plan follow each other on it."""

    def __init__(self, launch: Launcher, run_raw: RawLauncher, *, emulated: bool = False) -> None:
        self._launch = launch
        self._run_raw = run_raw
        # The interpreter multiplies bfloat16 as if its bit patterns were integers.
        self._upcast = emulated

    def prepare_layer(self, layer: "PagedKv") -> CudaLayer:
        """Segments and scales on the device. Raises StrideError and UnsupportedFeatureError."""
        return prepare_layer(layer)

    def prepare(self, plan: "AttentionPlan") -> CudaWork:
        """Work list and workspace, on the device. Raises UnsupportedFeatureError for what the launch table has not."""
        geometry = plan.geometry
        launch_table.check_cache(geometry.dtype, geometry.head_dim, None)
        sizes = launch_table.sizes(geometry.dtype, geometry.head_dim)
        with _on(geometry.device):
            return place_on_device(plan, lay_out_on_host(plan, sizes.narrow, sizes.wide))

    def attend(self, plan: "AttentionPlan", query: Tensor, layer: "PagedKv", out: Tensor, lse: Tensor) -> None:
        """Launches at most three kernels, always the same ones for the same plan. Raises UnsupportedFeatureError for
        dtypes of queries that the launch table has not, DtypeError unless `out` has the query's."""
        geometry, work, facts = plan.geometry, plan.work, layer.prepared
        pair = launch_table.attend(query.dtype, geometry.dtype, geometry.head_dim)
        if out.dtype != query.dtype:
            raise DtypeError("out", f"the query's {query.dtype} expected on CUDA, got {out.dtype}")
        shape = Shape(
            plan.num_query_heads,
            plan.group_size,
            geometry.block_size,
            geometry.head_dim,
            plan.scale,
            plan.soft_cap or 0.0,
        )
        general = plan.soft_cap is not None or plan.alibi_slopes is not None or facts.num_segments > 1
        query = query.detach()
        given = query if launcher.is_aligned(query) else query.contiguous()
        result = out if launcher.is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        with plan.lock, _on(geometry.device):
            for wide, constants, count in (
                (True, pair.wide, work.room.wide),
                (False, pair.narrow, work.room.narrow),
            ):
                if count:
                    launcher.attend(
                        self._launch,
                        AttendLaunch(query.dtype, geometry.dtype, geometry.head_dim, general, wide, constants),
                        shape,
                        work,
                        facts,
                        given,
                        layer.keys[0],
                        layer.values[0],
                        result,
                        lse,
                        upcast=self._upcast,
                    )
            if work.room.merges:
                entry = MergeLaunch(query.dtype, launch_table.padded(geometry.head_dim))
                launcher.merge(self._launch, entry, shape, work, result, lse)
            if result is not out:
                out.copy_(result)

    def write(self, plan: "AttentionPlan", key: Tensor, value: Tensor, layer: "PagedKv") -> None:
        """Copy or quantise rows to slots. Raises UnsupportedFeatureError for dtypes of rows that the launch table has
        not."""
        geometry = plan.geometry
        launch_table.attend(key.dtype, geometry.dtype, geometry.head_dim)
        entry = WriteLaunch(key.dtype, geometry.dtype, launch_table.padded(geometry.head_dim))
        if not plan.num_tokens:
            return
        new_key, new_value = (
            part if launcher.is_aligned(part) else part.contiguous() for part in (key.detach(), value.detach())
        )
        with _on(geometry.device):
            launcher.write(
                self._launch,
                entry,
                plan.work.slots,
                layer.prepared,
                new_key,
                new_value,
                layer.keys[0],
                layer.values[0],
            )

    def copy_blocks(self, layer: "PagedKv", sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """At once where no block is source and destination; otherwise all are gathered before any is written."""
        if not np.isin(destinations, sources).any():
            self._raw("copy_blocks", layer, sources, _uploaded(destinations, layer), *_sizes(layer))
            return
        geometry = layer.geometry
        shape = (len(sources), geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
        key, value = (torch.empty(shape, dtype=geometry.dtype, device=geometry.device) for _ in range(2))
        self.gather_blocks(layer, sources, key, value)
        self.scatter_blocks(layer, destinations, key, value)

    def gather_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64], key: Tensor, value: Tensor) -> None:
        """Blocks to buffers."""
        self._raw("move_blocks", layer, blocks, *_sizes(layer), _GATHER, key, value)

    def scatter_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64], key: Tensor, value: Tensor) -> None:
        """Buffers to blocks."""
        self._raw("move_blocks", layer, blocks, *_sizes(layer), _SCATTER, key, value)

    def zero_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64]) -> None:
        """Zero bytes."""
        nothing = layer.keys[0]
        self._raw("move_blocks", layer, blocks, *_sizes(layer), _ZERO, nothing, nothing)

    def checksum_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """One number per block; waits for it."""
        sums = torch.zeros(len(blocks), dtype=torch.int64, device=layer.geometry.device)
        self._raw("checksum_blocks", layer, blocks, *_sizes(layer), sums)
        return sums.cpu().numpy().view(np.uint64)

    def _raw(self, name: str, layer: "PagedKv", blocks: NDArray[np.int64], *arguments: Tensor | int) -> None:
        if not len(blocks):
            return
        with _on(layer.geometry.device):
            ids = _uploaded(blocks, layer)
            self._run_raw(name, (len(blocks), 2), THREADS, (layer.prepared.addresses, ids, *arguments))


def _sizes(layer: "PagedKv") -> tuple[int, int, int]:
    geometry = layer.geometry
    return geometry.block_size, geometry.num_kv_heads, geometry.head_dim * geometry.dtype.itemsize // 16


def _uploaded(blocks: NDArray[np.int64], layer: "PagedKv") -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(blocks)), layer.geometry.device)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def cuda_backend() -> CudaBackend:
    """The backend of CUDA devices. Raises ImportError without triton."""
    from kvplane.kernels.cuda.raw import run_raw

    return CudaBackend(launcher.start, run_raw)


def emulated_backend() -> CudaBackend:
    """The same kernels on host memory, see emulation.py."""
    from kvplane.kernels.cuda.emulation import run_raw

    return CudaBackend(launcher.start, run_raw, emulated=True)
