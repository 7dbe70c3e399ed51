"""Compile before the first request instead of during it, and say what was done."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvplane.kernels import api
from kvplane.kernels.cpu import blocks, merge, narrow, wide
from kvplane.kernels.cpu.jit import CACHE_FOLDER
from kvplane.kernels.paged_kv import SUPPORTED_DTYPES, PagedKv
from kvplane.kernels.planning import plan

_log = logging.getLogger(__name__)
_ENTRY_POINTS: tuple[Any, ...] = (
    narrow.attend_narrow,
    wide.attend_wide,
    merge.merge_partials,
    blocks.write_slots,
    blocks.move_blocks,
    blocks.checksum,
)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did: kernels compiled anew, kernels loaded from `cache_folder`, and how long it took."""

    compiled: int
    loaded: int
    seconds: float
    cache_folder: Path


def _counts() -> tuple[int, int]:
    stats = [kernel.stats for kernel in _ENTRY_POINTS]
    return sum(sum(s.cache_misses.values()) for s in stats), sum(sum(s.cache_hits.values()) for s in stats)


def warm_up(dtypes: Iterable[torch.dtype] = SUPPORTED_DTYPES) -> WarmUp:
    """Make every CPU kernel ready for caches of these dtypes; runs each once on a few bytes of its own.

    Takes a few seconds per dtype the first time on a machine, a fraction of one after that. Logs one line.
    """
    begin = time.perf_counter()
    compiled, loaded = _counts()
    for dtype in dtypes:
        layer = PagedKv.of(*(torch.zeros(4, 1, 16, 16, dtype=dtype) for _ in range(2)))
        batch = plan(layer.geometry, [[1, 0], [2, 3]], [1, 32], [1, 32], num_query_heads=1)
        rows = torch.zeros(33, 1, 16, dtype=dtype)
        api.write(batch, rows, rows, layer)
        api.attend(batch, rows, layer)
        api.copy_blocks(layer, [1], [2])
        api.checksum_blocks(layer, [1])
    after_compiled, after_loaded = _counts()
    report = WarmUp(after_compiled - compiled, after_loaded - loaded, time.perf_counter() - begin, CACHE_FOLDER)
    _log.info(
        "kernels ready in %.1f s: %d compiled, %d loaded from %s",
        report.seconds,
        report.compiled,
        report.loaded,
        report.cache_folder,
    )
    return report
