"""The truth: every operation once more, in float64 and one token at a time. Slow on purpose.

Every backend is tested against this file, so it shares nothing with them but the meaning of a plan: no work
list, no splits, no tiles.
"""

import torch
from torch import Tensor

from kvplane.kernels.paged_kv import PagedKv
from kvplane.kernels.planning import AttentionPlan
from kvplane.kernels.quantise import QUANTISED_DTYPES, quantised


def slot_of(layer: PagedKv, block: int, offset: int) -> tuple[Tensor, Tensor]:
    """Views [kv_heads, head_dim] of one slot's key and value."""
    segment = 0
    while block >= layer.keys[segment].shape[0]:
        block -= layer.keys[segment].shape[0]
        segment += 1
    return layer.keys[segment][block, :, offset], layer.values[segment][block, :, offset]


def attend(plan: AttentionPlan, query: Tensor, layer: PagedKv) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, shaped as by `kvplane.kernels.attend`."""
    heads, dim, size = plan.num_query_heads, plan.geometry.head_dim, plan.geometry.block_size
    out = torch.zeros(plan.num_tokens, heads, dim, dtype=torch.float64)
    lse = torch.full((plan.num_tokens, heads), -torch.inf, dtype=torch.float64)
    row = 0
    for table, length, queries in zip(plan.block_tables, plan.sequence_lengths, plan.query_lengths, strict=True):
        start = 0 if plan.window is None else max(0, length - queries + 1 - plan.window)
        slots = [slot_of(layer, int(table[p // size]), p % size) for p in range(start, length)] if queries else []
        for position in range(length - queries, length):
            first = start if plan.window is None else max(0, position - plan.window + 1)
            last = position if plan.causal else length - 1
            if last >= first:
                visible = slots[first - start : last + 1 - start]
                key, value = (torch.stack(part).double() for part in zip(*visible, strict=True))
                if layer.key_scale is not None:
                    key = key * layer.key_scale.cpu().double()[:, None]
                if layer.value_scale is not None:
                    value = value * layer.value_scale.cpu().double()[:, None]
                key, value = (part.repeat_interleave(plan.group_size, 1) for part in (key, value))
                scores = torch.einsum("hd,khd->hk", query[row].double(), key) * plan.scale
                if plan.soft_cap is not None:
                    scores = plan.soft_cap * torch.tanh(scores / plan.soft_cap)
                if plan.alibi_slopes is not None:
                    distance = torch.arange(first, last + 1) - position
                    scores += plan.alibi_slopes.cpu().double()[:, None] * distance
                if plan.sinks is not None:
                    scores = torch.cat([scores, plan.sinks.cpu().double()[:, None]], 1)
                lse[row] = torch.logsumexp(scores, 1)
                out[row] = torch.einsum("hk,khd->hd", torch.softmax(scores, 1)[:, : len(visible)], value)
            row += 1
    return out, lse


def write(plan: AttentionPlan, key: Tensor, value: Tensor, layer: PagedKv) -> None:
    """As `kvplane.kernels.write`."""
    if layer.geometry.dtype in QUANTISED_DTYPES:
        key, value = (
            quantised(rows, scales, layer.geometry.dtype)
            for rows, scales in ((key, layer.key_scale), (value, layer.value_scale))
        )
    for row, slot in enumerate(plan.slots.tolist()):
        if slot >= 0:
            to_key, to_value = slot_of(layer, slot // plan.geometry.block_size, slot % plan.geometry.block_size)
            to_key.copy_(key[row])
            to_value.copy_(value[row])
