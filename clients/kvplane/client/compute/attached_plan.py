"""A forward pass on memory that this process has mapped."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvplane import kernels
from kvplane.client.compute.batch import Batch, Options, check_rows
from kvplane.client.compute.work import Work
from kvplane.client.sequences import I32
from kvplane.kernels import AttentionPlan, KernelError
from kvplane.wire.errors import InvalidArgumentError, PreconditionError

if TYPE_CHECKING:
    from kvplane.client.compute.attached import AttachedCompute


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
        self._made: dict[tuple[int, int, int | None, float | None], AttentionPlan] = {}
        # What is wrong with lengths, tables or options is told here, and not in the middle of a forward pass.
        first = compute.topology.layers[0]
        for work in compute.works.of(first, options.num_query_heads):
            self._kernel_plan(work, options.window_of(first), options.scale)

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
        options = self._options
        window = options.window_of(layer)
        try:
            for work in self._compute.works.of(layer, options.num_query_heads):
                plan, heads = self._kernel_plan(work, window, options.scale), work.kv_heads
                if heads is None:
                    kernels.write(plan, key, value, work.blocks)
                else:
                    kernels.write(plan, key[:, heads], value[:, heads], work.blocks)
        except KernelError as error:
            raise InvalidArgumentError.of(error.field, error.description) from error

    def attend(
        self, layer: int, query: Tensor, out: Tensor | None = None, *, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend alone: see `ComputePlan.attend`."""
        lse = torch.empty((self.num_tokens, self._options.num_query_heads), dtype=torch.float32, device=query.device)
        return self._attend(layer, query, out, lse, scale), lse

    def close(self) -> None:
        """End the plan, once what it launched has completed."""
        token, self._token = self._token, None
        if token is not None:
            self._compute.wait_for_device()
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
        options = self._options
        window, scale = options.window_of(layer), options.scale if scale is None else scale
        try:
            for work in self._compute.works.of(layer, options.num_query_heads):
                if not work.attends:
                    continue
                plan, heads = self._kernel_plan(work, window, scale), work.query_heads
                if heads is None:
                    kernels.attend(plan, query, work.blocks, out=out, lse=lse)
                else:
                    part = None if lse is None else lse[:, heads]
                    kernels.attend(plan, query[:, heads], work.blocks, out=out[:, heads], lse=part)
        except KernelError as error:
            raise InvalidArgumentError.of(error.field, error.description) from error
        return out

    def _check_open(self) -> None:
        if self._token is None:
            raise PreconditionError("the plan is closed")
        self._compute.check_launch()

    def _kernel_plan(self, work: Work, window: int | None, scale: float | None) -> AttentionPlan:
        key = (work.geometry, work.num_query_heads, window, scale)
        found = self._made.get(key)
        if found is None:
            try:
                found = self._made[key] = kernels.plan(
                    work.blocks.geometry,
                    self._tables,
                    self._batch.kv_lengths,
                    self._batch.query_lengths,
                    num_query_heads=work.num_query_heads,
                    scale=scale,
                    window=window,
                    soft_cap=self._options.soft_cap,
                )
            except KernelError as error:
                raise InvalidArgumentError.of(error.field, error.description) from error
        return found
