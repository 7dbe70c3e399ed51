"""What a chaos engine stores and must read: rows that depend on all that a key depends on, without a model."""

from functools import lru_cache
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

NUM_LAYERS, NUM_KV_HEADS, NUM_QUERY_HEADS, HEAD_DIM = 2, 4, 8, 16
TOLERANCE = 2e-5
"""Of float32 outputs, relative and absolute; rows are standard normal, so a foreign one is off by about 1."""


class Oracle:
    """Queries, keys and values as a function of (namespace, token prefix, position, layer, head)."""

    def __init__(self, cached_rows: int = 20_000) -> None:
        self._at = lru_cache(cached_rows)(_rows)

    def rows(self, namespace: str, tokens: list[int], start: int, end: int) -> Tensor:
        """Rows of positions `start` to `end`: float32 [positions, layers, query + 2 x KV heads, head_dim]."""
        packed = np.array(tokens[:end], "<u4").tobytes()
        at = [self._at(namespace, packed[: 4 * (position + 1)]) for position in range(start, end)]
        return torch.from_numpy(np.stack(at))

    def attention(self, rows: Tensor, start: int, layer: int) -> Tensor:
        """Outputs of positions `start` on, given the rows of all positions: float64 [positions, query heads, head_dim].

        Softmax of scaled products over all positions up to the query's own, in float64 and without blocks.
        """
        query, key, value = parts(rows[:, layer].double())
        group = NUM_QUERY_HEADS // NUM_KV_HEADS
        keys, values = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (key, value))
        scores = query[start:].transpose(0, 1) @ keys.transpose(1, 2) * HEAD_DIM**-0.5
        hidden = torch.arange(len(rows))[None] > torch.arange(start, len(rows))[:, None]
        return (torch.softmax(scores.masked_fill(hidden, -torch.inf), 2) @ values).transpose(0, 1)


def parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one layer's rows [positions, heads, head_dim]."""
    first, second = NUM_QUERY_HEADS, NUM_QUERY_HEADS + NUM_KV_HEADS
    return rows[:, :first], rows[:, first:second], rows[:, second:]


def differs(got: Tensor, expected: Tensor) -> list[int]:
    """Positions whose outputs are not as close as float32 allows; not-a-number differs."""
    close = torch.isclose(got.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    found: list[int] = torch.nonzero(~close.flatten(1).all(1)).flatten().tolist()
    return found


def _rows(namespace: str, prefix: bytes) -> np.ndarray:
    seed = int.from_bytes(sha256(namespace.encode() + b"\0" + prefix).digest()[:8], "little")
    shape = NUM_LAYERS, NUM_QUERY_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
