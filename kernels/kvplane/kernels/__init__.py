"""Paged attention and block operations on plain tensors. It knows no sequence, no tenant, no RPC.

Wrap a layer's block tensors in a `PagedKv`, make one `plan` per step, then `write` and `attend` per layer.
Importing this imports torch; a backend and its compiler are imported with the first plan on its device.
"""

from kvplane.kernels.api import (
    attend,
    checksum_blocks,
    copy_blocks,
    gather_blocks,
    merge_states,
    scatter_blocks,
    write,
    zero_blocks,
)
from kvplane.kernels.cpu.threads import get_num_threads, set_num_threads
from kvplane.kernels.errors import (
    DeviceError,
    DtypeError,
    KernelError,
    ShapeError,
    SlotError,
    StrideError,
    TableError,
    UnsupportedFeatureError,
)
from kvplane.kernels.paged_kv import KvGeometry, Layout, PagedKv
from kvplane.kernels.planning import AttentionPlan, plan

__all__ = [
    "AttentionPlan",
    "DeviceError",
    "DtypeError",
    "KernelError",
    "KvGeometry",
    "Layout",
    "PagedKv",
    "ShapeError",
    "SlotError",
    "StrideError",
    "TableError",
    "UnsupportedFeatureError",
    "attend",
    "checksum_blocks",
    "copy_blocks",
    "gather_blocks",
    "get_num_threads",
    "merge_states",
    "plan",
    "scatter_blocks",
    "set_num_threads",
    "write",
    "zero_blocks",
]
