"""Kernels in CUDA C, compiled by NVRTC and launched through CuPy on torch's current stream."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("blocks.cu")
OPTIONS = ("-std=c++17", "-default-device")
NAMES = ("move_blocks", "copy_blocks", "checksum_blocks")


@functools.cache
def _kernel(device: int, name: str) -> Any:  # noqa: ARG001 - a module belongs to its device's context
    import cupy

    return cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS, backend="nvrtc").get_function(name)


def run_raw(name: str, grid: tuple[int, int], threads: int, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel of blocks.cu; tensors are passed by their addresses, integers as C ints."""
    import cupy

    device = torch.cuda.current_device()
    packed = tuple(np.intp(each.data_ptr()) if isinstance(each, Tensor) else np.int32(each) for each in arguments)
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        _kernel(device, name)(grid, (threads,), packed)
