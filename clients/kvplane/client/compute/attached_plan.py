"""A forward pass on memory that this process has mapped."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvplane import kernels
from kvplane.client.compute.batch import Batch, Options, check_rows
from kvplane.client.sequences import I32
from kvplane.kernels import AttentionPlan, KernelError, KvGeometry, PagedKv
from kvplane.wire.errors import InvalidArgumentError, PreconditionError

if TYPE_CHECKING:
    from kvplane.client.compute.attached import AttachedCompute

_Work = tuple[PagedKv, slice, slice | None, int]
"""A shard's blocks of a layer, its KV heads, the query heads it attends with, and how many its kernel plan is for."""


class AttachedPlan:
    """See `ComputePlan`. Kernel plans are made once per geometry, query heads, window and scale, and shared by layers
    and shards. Used by one thread."""

    def __init__(self, compute: "AttachedCompute", token: int, batch: Batch, tables: I32, options: Options) -> None:
        self.num_tokens = batch.num_tokens
        self._compute = compute
        self._token: int | None = token
        self._batch = batch
        self._tables = tables
        self._options = options
        self._made: dict[tuple[KvGeometry, int, int | None, float | None], AttentionPlan] = {}
        self._work: dict[int, list[_Work]] = {}
        # What is wrong with lengths, tables or options is told here, and not in the middle of a forward pass.
        first = compute.topology.layers[0]
        for blocks, _, _, heads in self._work_of(first):
            self._kernel_plan(blocks, heads, options.window_of(first), options.scale)

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
        """Write, then attend: see `ComputePlan.run`."""
        self.write(layer, key, value)
        return self._attend(layer, query, out, None, scale)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write alone: see `ComputePlan.write`."""
        self._check_open()
        topology = self._compute.topology
        shape = (self.num_tokens, topology.num_kv_heads, topology.head_dim)
        check_rows("key", key, shape)
        check_rows("value", value, shape)
        work = self._work_of(layer)
        window, scale = self._options.window_of(layer), self._options.scale
        try:
            for blocks, kv_heads, _, heads in work:
                plan = self._kernel_plan(blocks, heads, window, scale)
                kernels.write(plan, key[:, kv_heads], value[:, kv_heads], blocks)
        except KernelError as error:
            raise InvalidArgumentError.of(error.field, error.description) from error

    def attend(
        self, layer: int, query: Tensor, out: Tensor | None = None, *, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend alone: see `ComputePlan.attend`."""
        lse = torch.empty((self.num_tokens, self._options.num_query_heads), dtype=torch.float32, device=query.device)
        return self._attend(layer, query, out, lse, scale), lse

    def close(self) -> None:
        """The kernels of the CPU have completed when they return, so nothing is waited for."""
        token, self._token = self._token, None
        if token is not None:
            self._work.clear()
            self._made.clear()
            self._compute.plan_closed(self, token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attend(self, layer: int, query: Tensor, out: Tensor | None, lse: Tensor | None, scale: float | None) -> Tensor:
        self._check_open()
        shape = (self.num_tokens, self._options.num_query_heads, self._compute.topology.head_dim)
        check_rows("query", query, shape)
        if out is None:
            out = torch.empty(shape, dtype=query.dtype, device=query.device)
        else:
            check_rows("out", out, shape)
        window = self._options.window_of(layer)
        try:
            for blocks, _, queries, heads in self._work_of(layer):
                if queries is not None:
                    plan = self._kernel_plan(blocks, heads, window, self._options.scale if scale is None else scale)
                    to_lse = None if lse is None else lse[:, queries]
                    kernels.attend(plan, query[:, queries], blocks, out=out[:, queries], lse=to_lse)
        except KernelError as error:
            raise InvalidArgumentError.of(error.field, error.description) from error
        return out

    def _check_open(self) -> None:
        if self._token is None:
            raise PreconditionError("the plan is closed")
        self._compute.check_launch()

    def _work_of(self, layer: int) -> list[_Work]:
        work = self._work.get(layer)
        if work is None:
            compute = self._compute
            work = self._work[layer] = [
                (compute.shards[part.shard].layers[layer], part.kv_heads, part.query_heads, part.num_query_heads)
                for part in compute.topology.parts(layer, self._options.num_query_heads)
            ]
        return work

    def _kernel_plan(self, blocks: PagedKv, heads: int, window: int | None, scale: float | None) -> AttentionPlan:
        key = (blocks.geometry, heads, window, scale)
        found = self._made.get(key)
        if found is None:
            try:
                found = self._made[key] = kernels.plan(
                    blocks.geometry,
                    self._tables,
                    self._batch.kv_lengths,
                    self._batch.query_lengths,
                    num_query_heads=heads,
                    scale=scale,
                    window=window,
                    soft_cap=self._options.soft_cap,
                )
            except KernelError as error:
                raise InvalidArgumentError.of(error.field, error.description) from error
        return found
