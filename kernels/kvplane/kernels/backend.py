"""What a backend has to offer, and which one serves a device."""

import functools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplane.kernels.cuda import emulation
from kvplane.kernels.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from kvplane.kernels.paged_kv import PagedKv
    from kvplane.kernels.planning import AttentionPlan


class Backend(Protocol):
    """The operations of one kind of device. Arguments were validated by the caller, api.py or planning.py."""

    def prepare_layer(self, layer: "PagedKv") -> Any:
        """The backend's own part of a layer: checks and device copies, made when a pool is."""
        ...

    def prepare(self, plan: "AttentionPlan") -> Any:
        """The backend's own part of a plan: work list, workspace, device copies."""
        ...

    def attend(self, plan: "AttentionPlan", query: Tensor, layer: "PagedKv", out: Tensor, lse: Tensor) -> None:
        """Fill `out` and `lse`, every row of them."""
        ...

    def write(self, plan: "AttentionPlan", key: Tensor, value: Tensor, layer: "PagedKv") -> None:
        """Store the rows' keys and values at the plan's slots."""
        ...

    def copy_blocks(self, layer: "PagedKv", sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        """Copy blocks as if all were read before any is written."""
        ...

    def gather_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64], key: Tensor, value: Tensor) -> None:
        """Copy blocks into contiguous tensors of the canonical order."""
        ...

    def scatter_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64], key: Tensor, value: Tensor) -> None:
        """Copy contiguous tensors of the canonical order into blocks."""
        ...

    def zero_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64]) -> None:
        """Overwrite blocks with zero bytes."""
        ...

    def checksum_blocks(self, layer: "PagedKv", blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """One checksum per block over its canonical bytes, keys before values."""
        ...


@functools.cache
def _cpu() -> Backend:
    # numba is imported when a CPU plan is made, not when the package is
    from kvplane.kernels.cpu.backend import CpuBackend

    return CpuBackend()


@functools.cache
def _cuda() -> Backend:
    try:
        from kvplane.kernels.cuda.backend import cuda_backend

        return cuda_backend()
    except ImportError as error:
        raise UnsupportedFeatureError("device", f"CUDA needs the extra kvplane[gpu]: {error}") from error


@functools.cache
def _emulated() -> Backend:
    emulation.prepare_interpreter()
    from kvplane.kernels.cuda.backend import emulated_backend

    return emulated_backend()


def backend_for(device: torch.device) -> Backend:
    """The backend of a device; raises UnsupportedFeatureError where none is built."""
    if device.type == "cpu":
        return _emulated() if emulation.wanted() else _cpu()
    if device.type == "cuda":
        return _cuda()
    raise UnsupportedFeatureError("device", f"no backend for {device} is built; CPU and CUDA have one")


def prepared_layer(layer: "PagedKv") -> Any:
    """The backend's own part of a layer. The CPU has none, so wrapping tensors there loads no compiler."""
    device = layer.geometry.device
    if device.type in ("cpu", "meta") and not emulation.wanted():
        return None
    return backend_for(device).prepare_layer(layer)
