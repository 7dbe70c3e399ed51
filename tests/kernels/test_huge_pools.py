"""Addresses past 2^31 elements and block ids past 2^16, on a mapping that exists only where it is touched."""

import mmap

import pytest
import torch

from kvplane import kernels
from kvplane.kernels import Layout, PagedKv, reference

MAP_NORESERVE = 0x4000  # Linux; not in the mmap module before Python 3.13
BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 1, 64
ELEMENTS = BLOCK_SIZE * KV_HEADS * HEAD_DIM


def sparse(elements: int) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", Layout)
def test_01_02_offsets_and_ids_are_not_truncated(layout: Layout) -> None:
    num_blocks = (1 << 31) // (2 * ELEMENTS) + 5
    inner = (KV_HEADS, BLOCK_SIZE) if layout is Layout.HND else (BLOCK_SIZE, KV_HEADS)
    pool = sparse(num_blocks * 2 * ELEMENTS).view(num_blocks, 2, *inner, HEAD_DIM)
    layer = PagedKv.interleaved(pool, layout=layout)
    assert pool.numel() > 1 << 31
    tables = [[num_blocks - 1, (1 << 16) - 1, 1 << 16], [(1 << 16) + 1, num_blocks - 2, 1]]
    lengths = [48, 37]
    writer = kernels.plan(layer.geometry, tables, lengths, lengths, num_query_heads=2)
    rows = torch.randn(2, sum(lengths), KV_HEADS, HEAD_DIM).bfloat16()
    kernels.write(writer, rows[0], rows[1], layer)
    reader = kernels.plan(layer.geometry, tables, lengths, num_query_heads=2)
    query = torch.randn(2, 2, HEAD_DIM).bfloat16()
    for plan, q in ((reader, query), (writer, query[:1].expand(sum(lengths), -1, -1))):
        out, _ = kernels.attend(plan, q, layer)
        expected, _ = reference.attend(plan, q, layer)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)
    kernels.copy_blocks(layer, [num_blocks - 1], [num_blocks - 3])
    assert torch.equal(pool[num_blocks - 3], pool[num_blocks - 1])
    key, _ = kernels.gather_blocks(layer, [num_blocks - 1])
    assert torch.equal(key.view(-1, HEAD_DIM), rows[0, :16].view(-1, HEAD_DIM))
    assert kernels.checksum_blocks(layer, [num_blocks - 1]) == kernels.checksum_blocks(layer, [num_blocks - 3])
    kernels.zero_blocks(layer, [num_blocks - 1])
    assert not pool[num_blocks - 1].any()
