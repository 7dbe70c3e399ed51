"""How wrong a backend may be: judged by what torch gets wrong in the same dtype, not by constants."""

import torch
from torch import Tensor

from kernel_cases import Batch, block_views
from kvplane.kernels import reference


def dense_attention(batch: Batch) -> Tensor:
    """Plain torch operations in the case's own dtype, on contiguous keys and values."""
    case, plan = batch.case, batch.plan()
    out = torch.zeros_like(batch.query)
    row = 0
    for b, (length, queries) in enumerate(case.sequences):
        rows = slice(row, row + queries)
        row += queries
        if not length or not queries:
            continue
        first = 0 if case.window is None else max(0, length - queries + 1 - case.window)
        skipped = first // case.block_size
        blocks = [block_views(batch.layer, int(i)) for i in batch.tables[b, skipped : -(-length // case.block_size)]]
        key, value = (torch.cat(part, 1)[:, : length - skipped * case.block_size] for part in zip(*blocks, strict=True))
        key, value = (
            part if scale is None else part.float() * scale.cpu()[:, None, None]
            for part, scale in ((key, batch.layer.key_scale), (value, batch.layer.value_scale))
        )
        key, value = (part.to(case.rows_dtype).repeat_interleave(case.group, 0) for part in (key, value))
        scores = batch.query[rows].transpose(0, 1) @ key.transpose(1, 2) * plan.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        position = torch.arange(length - queries, length)[:, None]
        seen = torch.arange(skipped * case.block_size, length)[None]
        if case.slopes is not None:
            scores = scores + (case.slopes[:, None, None] * (seen - position)).to(scores.dtype)
        hidden = seen > position if case.causal else seen < 0
        if case.window is not None:
            hidden = hidden | (seen <= position - case.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if case.sink_logits is not None:
            sinks = case.sink_logits.to(scores.dtype)[:, None, None].expand(-1, queries, 1)
            scores = torch.cat([scores, sinks], 2)
        weights = torch.softmax(scores, 2)[..., : key.shape[1]]
        out[rows] = (weights @ value).transpose(0, 1)
    return out


def assert_as_good_as_torch(batch: Batch, out: Tensor, lse: Tensor) -> None:
    """The error against float64 is at most twice that of torch in the same dtype, plus rounding.

    The bound and the first rounding term are those FlashAttention's tests use; the second is four units in
    the last place of the float32 in which sums are kept, for cases so small that torch is exact by luck.
    """
    expected, expected_lse = reference.attend(batch.plan(), batch.query, batch.layer)
    factor = 3 if batch.case.soft_cap is not None else 2
    reachable = (dense_attention(batch).double() - expected).abs().max().item() if out.numel() else 0.0
    rounded = expected.to(out.dtype)
    rounding = 2 * (rounded + 0.3 - 0.3 - rounded).abs().max().item() if out.numel() else 0.0
    rounding += 4 * torch.finfo(torch.float32).eps * expected.abs().max().item() if out.numel() else 0.0
    error = (out.double() - expected).abs().max().item() if out.numel() else 0.0
    assert error <= factor * reachable + rounding, (error, reachable, rounding)
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out[empty].any(), "rows that see no key are zeros"
    torch.testing.assert_close(lse[~empty].double(), expected_lse[~empty], rtol=2e-6, atol=4e-6)
