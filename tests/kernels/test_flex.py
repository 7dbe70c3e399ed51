"""A second opinion: PyTorch's own paged attention on the same blocks."""

import pytest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvplane import kernels
from kvplane.kernels import PagedKv

PAGE, BATCH, LENGTH, KV_HEADS, GROUP, DIM = 128, 2, 300, 2, 2, 64


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_agrees_with_flex_paged_attention() -> None:
    pages = 8
    torch.manual_seed(0)
    key, value = (torch.randn(BATCH, KV_HEADS, LENGTH, DIM) for _ in range(2))
    query = torch.randn(BATCH, KV_HEADS * GROUP, 1, DIM)
    paged = PagedAttention(pages, PAGE, BATCH, device="cpu")
    for b in range(BATCH):
        paged.reserve(torch.tensor(b), torch.tensor(LENGTH))
    cache_shape = (1, KV_HEADS, pages * PAGE, DIM)
    key_cache, value_cache = torch.zeros(cache_shape), torch.zeros(cache_shape)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    paged.assign(torch.arange(BATCH), positions, key, value, key_cache, value_cache)
    mask = create_block_mask(lambda _b, _h, _q, k: k < LENGTH, BATCH, None, 1, 512, device="cpu")
    physical = paged.convert_logical_block_mask(mask)
    score = paged.get_score_mod(None)
    with torch.no_grad():
        expected = torch.compile(flex_attention)(
            query, key_cache, value_cache, block_mask=physical, score_mod=score, enable_gqa=True
        )

    # our block 0 is the null block, so their page p is our block p + 1
    blocks = (key_cache, value_cache)
    layer = PagedKv.of(
        *(
            torch.cat(
                [
                    torch.full((1, KV_HEADS, PAGE, DIM), torch.nan),
                    c[0].view(KV_HEADS, pages, PAGE, DIM).transpose(0, 1),
                ]
            )
            for c in blocks
        )
    )
    tables = paged.page_table[:, : -(-LENGTH // PAGE)] + 1
    plan = kernels.plan(layer.geometry, tables, [LENGTH] * BATCH, num_query_heads=KV_HEADS * GROUP)
    out, _ = kernels.attend(plan, query[:, :, 0], layer)
    torch.testing.assert_close(out, expected[:, :, 0], rtol=0, atol=2e-6)
