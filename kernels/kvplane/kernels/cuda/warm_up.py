"""Compile or load every kernel that a pool may launch before the first request, and say what it took."""

import logging
import time

import torch

from kvplane.kernels import api
from kvplane.kernels.cuda import launch_table
from kvplane.kernels.paged_kv import PagedKv
from kvplane.kernels.planning import plan

_log = logging.getLogger(__name__)


def warm_up(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Run each kernel for such a cache once on a few blocks of its own; returns seconds."""
    begin = time.perf_counter()
    keys, values = (torch.zeros(8, 1, 16, head_dim, dtype=dtype, device=device) for _ in range(2))
    layer = PagedKv.of(keys, values)
    for query_dtype in launch_table.query_dtypes(dtype, head_dim):
        rows = torch.zeros(41, 1, head_dim, dtype=query_dtype, device=device)
        for soft_cap in (None, 1.0):
            batch = plan(layer.geometry, [[1, 0, 0], [2, 3, 4]], [1, 40], [1, 40], num_query_heads=1, soft_cap=soft_cap)
            api.attend(batch, rows, layer)
        api.write(batch, rows, rows, layer)
    api.copy_blocks(layer, [1], [2])
    api.zero_blocks(layer, [1])
    api.checksum_blocks(layer, [1])
    seconds = time.perf_counter() - begin
    _log.info("CUDA kernels ready in %.1f s", seconds)
    return seconds
