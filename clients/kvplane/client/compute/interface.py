"""Compute access as an engine sees it: the same calls, whether it maps the pool or has shards execute for it."""

from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Protocol, Self

import numpy.typing as npt
import torch
from torch import Tensor

from kvplane.client.state import SessionState

Transport = Literal["auto", "shm", "inline"]
"""How tensors reach a shard in remote mode; attached mode has `shm` only (CUDA memory comes with an extra)."""


class HasState(Protocol):
    """A `Session` or an `AsyncSession`."""

    @property
    def state(self) -> SessionState:
        """What the session knows."""
        ...


class ComputePlan(Protocol):
    """The batch of one forward pass. A context manager; closed, everything it launched has completed."""

    num_tokens: int
    """New tokens of all sequences: rows of every tensor below."""

    def run(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor | None = None,
        *,
        scale: float | None = None,
    ) -> Tensor:
        """Write this step's keys and values, then attend; returns `out` or a new tensor, shaped as the query.

        `query` [tokens, query heads, head_dim] of any float dtype that a pool may have; `key` and `value`
        [tokens, KV heads, head_dim] in the pool's dtype. `scale` replaces the plan's for this call. Raises
        `InvalidArgumentError` for shapes, dtypes and layers, and what ended the lease, the plan or the shard named.
        """
        ...

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write alone. Raises like `run`."""
        ...

    def attend(
        self, layer: int, query: Tensor, out: Tensor | None = None, *, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend alone; returns (out, lse), lse float32 [tokens, query heads], natural logarithm. Raises like `run`."""
        ...

    def close(self) -> None:
        """End the plan; a second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Compute(Protocol):
    """A way to the bytes of a session's pool. Not for use by several threads at once."""

    num_layers: int
    num_kv_heads: int
    """Over all shards."""
    head_dim: int
    dtype: torch.dtype
    """Of stored keys and values."""
    block_tokens: int
    device: torch.device
    """Where queries, keys and values have to be."""
    transport: Literal["shm", "inline"]
    """How tensors travel."""
    final_layer: int | None
    """Layer with which some shard has written all of its own: from then on a plan's slots take no second write. None:
    they do, as long as they are not committed."""

    def plan(
        self,
        sequence_ids: npt.ArrayLike,
        query_lengths: npt.ArrayLike,
        kv_lengths: npt.ArrayLike,
        *,
        num_query_heads: int,
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        windows: Mapping[int, int | None] | None = None,
    ) -> ComputePlan:
        """Fix the batch of a forward pass on the tables as the newest collected result left them.

        `kv_lengths` are tokens readable after the step's own writes, its last `query_lengths` of them new; the rows of
        all sequences follow each other. `scale` None: 1/sqrt(head_dim). `window` None: the pool's own (all tokens where
        it has none); `windows` gives single layers another. Raises `InvalidArgumentError`, `NotGrantedError` for a
        sequence without a table, `StaleGenerationError`, `StaleEpochError`, `LaunchPausedError`,
        `SessionExpiredError`, `UnavailableError`: nothing was launched then.
        """
        ...

    def close(self) -> None:
        """Give mappings and connections up; a second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
