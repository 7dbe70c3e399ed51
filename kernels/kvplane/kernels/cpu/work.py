"""A plan on the CPU: its work list, spread over heads, and the workspace.

Results do not depend on the number of threads: how an item is spread over heads does not change its arithmetic.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvplane.kernels.cpu.narrow import NARROW_ROWS
from kvplane.kernels.cpu.threads import get_num_threads
from kvplane.kernels.cpu.tiles import WIDE
from kvplane.kernels.work_list import SPLITS, Splitting, lay_out

if TYPE_CHECKING:
    from kvplane.kernels.planning import AttentionPlan

SIZES = Splitting(
    narrow_rows=NARROW_ROWS,
    wide_rows=WIDE,
    narrow_split=512,
    # Many rows share each read of K and V, so splitting serves parallelism only and costs partial outputs.
    wide_split=4096,
    unsplit_rows=256,
    prefix_split=2048,
)


@dataclass(frozen=True, slots=True, eq=False)
class CpuWork:
    """Columns of `tokens` and `members` as in `WorkList`; items have first and end KV head as two more columns."""

    tokens: NDArray[np.int64]
    members: NDArray[np.int64]
    narrow: NDArray[np.int64]
    wide: NDArray[np.int64]
    attended_tokens: int
    partial_output: NDArray[np.float32]  # [partials, query heads, head_dim]
    partial_lse: NDArray[np.float32]  # [partials, query heads]
    output: NDArray[np.float32]  # [rows, query heads, head_dim]


def _per_heads(items: NDArray[np.int64], num_heads: int, parts: int) -> NDArray[np.int64]:
    """Each item `parts` times, for `parts` ranges of KV heads."""
    bounds = np.arange(parts + 1) * num_heads // parts
    repeated = np.repeat(items, parts, axis=0)
    heads = np.stack([np.tile(bounds[:-1], len(items)), np.tile(bounds[1:], len(items))], axis=1)
    return np.concatenate([repeated, heads], axis=1)


def prepare(plan: "AttentionPlan") -> CpuWork:
    """Lay out the work of a validated plan; allocates its workspace."""
    work, num_kv_heads = lay_out(plan, SIZES), plan.geometry.num_kv_heads
    parts = min(num_kv_heads, max(1, -(-4 * get_num_threads() // max(len(work.narrow), 1))))
    partials = int(work.tokens[:, SPLITS].sum())
    heads, dim = plan.num_query_heads, plan.geometry.head_dim
    return CpuWork(
        tokens=work.tokens,
        members=work.members,
        narrow=_per_heads(work.narrow, num_kv_heads, parts),
        wide=_per_heads(work.wide, num_kv_heads, num_kv_heads),
        attended_tokens=work.attended_tokens,
        partial_output=np.empty((partials, heads, dim), np.float32),
        partial_lse=np.empty((partials, heads), np.float32),
        output=np.empty((plan.num_tokens, heads, dim), np.float32),
    )
