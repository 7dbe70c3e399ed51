"""Keys and values as a function of (token prefix, position, layer, head): a wrong byte anywhere shows."""

import functools
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor


class Oracle:
    """What a model would store and answer, without a model."""

    def __init__(self, num_layers: int, num_kv_heads: int, num_query_heads: int, head_dim: int, dtype: torch.dtype):
        self.num_layers, self.num_kv_heads = num_layers, num_kv_heads
        self.num_query_heads, self.head_dim, self.dtype = num_query_heads, head_dim, dtype
        self._at = functools.cache(self._compute)

    def _compute(self, prefix: bytes) -> tuple[Tensor, Tensor, Tensor]:
        seed = int.from_bytes(sha256(prefix).digest()[:8], "little")
        heads = self.num_query_heads + 2 * self.num_kv_heads
        drawn = np.random.default_rng(seed).standard_normal((self.num_layers, heads, self.head_dim), np.float32)
        rows = torch.from_numpy(drawn).to(self.dtype)
        first, second = self.num_query_heads, self.num_query_heads + self.num_kv_heads
        return rows[:, :first], rows[:, first:second], rows[:, second:]

    def rows(self, tokens: list[int], start: int, end: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of positions `start` to `end`: [positions, heads, head_dim] each."""
        packed = np.array(tokens, "<u4").tobytes()
        at = [self._at(packed[: 4 * (position + 1)]) for position in range(start, end)]
        query, key, value = (torch.stack([rows[part][layer] for rows in at]) for part in range(3))
        return query, key, value

    def attention(self, tokens: list[int], start: int, end: int, layer: int, window: int | None = None) -> Tensor:
        """Exact attention outputs of positions `start` to `end`, float64 [positions, query heads, head_dim]."""
        query, _, _ = self.rows(tokens, start, end, layer)
        _, key, value = self.rows(tokens, 0, end, layer)
        group = self.num_query_heads // self.num_kv_heads
        keys, values = (part.double().repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
        scores = query.double().transpose(0, 1) @ keys.transpose(1, 2) * self.head_dim**-0.5
        position, seen = torch.arange(start, end)[:, None], torch.arange(end)[None]
        hidden = seen > position
        if window is not None:
            hidden |= seen <= position - window
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), 2)
        return (weights @ values).transpose(0, 1)


def assert_attention(got: Tensor, expected: Tensor) -> None:
    """As close as the dtype of `got` allows."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
