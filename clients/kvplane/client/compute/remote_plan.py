"""A forward pass that shards execute."""

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvplane.client.compute.batch import Options, check_rows
from kvplane.client.compute.link import Sent, ShardLink
from kvplane.client.compute.stream import ShardStream
from kvplane.client.compute.topology import Part
from kvplane.v1 import compute_pb2, types_pb2
from kvplane.wire.errors import DeadlineExceededError, InvalidArgumentError, KvplaneError, PreconditionError

if TYPE_CHECKING:
    from kvplane.client.compute.remote import RemoteCompute

QUERY, KEY, VALUE = types_pb2.TENSOR_ROLE_QUERY, types_pb2.TENSOR_ROLE_KEY, types_pb2.TENSOR_ROLE_VALUE
OUTPUT, LSE = types_pb2.TENSOR_ROLE_OUTPUT, types_pb2.TENSOR_ROLE_LSE

_Work = tuple[
    Part,
    compute_pb2.Run,
    list[tuple[types_pb2.TensorRole.ValueType, Tensor]],
    list[tuple[types_pb2.TensorRole.ValueType, tuple[int, ...], torch.dtype]],
]
"""A shard's part, its run, the tensors it reads, and role, shape and dtype of its results."""

Bound = tuple[ShardLink, ShardStream]
"""A shard, and the stream on which the plan is open: a newer stream does not know it."""


class RemotePlan:
    """See `ComputePlan`. A run goes to all shards of its layer before the first answer is waited for."""

    def __init__(
        self,
        compute: "RemoteCompute",
        token: int,
        plan_id: int,
        num_tokens: int,
        options: Options,
        bound: Sequence[Bound],
    ) -> None:
        self.num_tokens = num_tokens
        self._compute = compute
        self._token: int | None = token
        self._plan_id = plan_id
        self._options = options
        self._bound = bound

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
        self._check(("query", query), ("key", key), ("value", value))
        return self._execute(layer, query, key, value, out, None, scale)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write alone: see `ComputePlan.write`."""
        self._check(("key", key), ("value", value))
        work: list[_Work] = []
        for part in self._parts(layer):
            run = compute_pb2.Run(plan_id=self._plan_id, layer=layer, kind=compute_pb2.RUN_KIND_WRITE)
            work.append((part, run, [(KEY, key[:, part.kv_heads]), (VALUE, value[:, part.kv_heads])], []))
        self._exchange(work)

    def attend(
        self, layer: int, query: Tensor, out: Tensor | None = None, *, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend alone: see `ComputePlan.attend`."""
        self._check(("query", query))
        lse = torch.empty((self.num_tokens, self._options.num_query_heads), dtype=torch.float32, device=query.device)
        return self._execute(layer, query, None, None, out, lse, scale), lse

    def close(self) -> None:
        """End the plan on all shards. Where a stream broke, its step counts as completed once that shard has answered
        on the next one."""
        token, self._token = self._token, None
        if token is None:
            return
        drained, sent = True, []
        for _, stream in self._bound:
            try:
                sent.append((stream, stream.send(close=compute_pb2.ClosePlan(plan_id=self._plan_id))))
            except KvplaneError:
                drained = False
        for stream, request_id in sent:
            try:
                stream.receive(request_id)
            except KvplaneError as error:
                # A refusal says that the plan is not open: nothing of it runs.
                drained &= stream.error is None and not isinstance(error, DeadlineExceededError)
        self._compute.plan_closed(self, token, drained=drained)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(KvplaneError):  # the error of the body is the one to see
            self.close()

    def _execute(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        if out is None:
            out = torch.empty(tuple(query.shape), dtype=query.dtype, device=query.device)
        else:
            check_rows("out", out, self._shape("out"))
        work: list[_Work] = []
        for part in self._parts(layer):
            inputs, results = [], []
            kind = compute_pb2.RUN_KIND_WRITE
            if part.query_heads is not None:
                kind = compute_pb2.RUN_KIND_ATTEND if key is None else compute_pb2.RUN_KIND_WRITE_AND_ATTEND
                queries = query[:, part.query_heads]
                inputs.append((QUERY, queries))
                results.append((OUTPUT, tuple(queries.shape), query.dtype))
                if lse is not None:
                    results.append((LSE, tuple(queries.shape[:2]), torch.float32))
            if key is not None and value is not None:
                inputs += [(KEY, key[:, part.kv_heads]), (VALUE, value[:, part.kv_heads])]
            if not inputs:
                continue
            run = compute_pb2.Run(plan_id=self._plan_id, layer=layer, kind=kind)
            if scale is not None:
                run.options.CopyFrom(compute_pb2.AttentionOptions(scale=scale, soft_cap=self._options.soft_cap or 0.0))
            work.append((part, run, inputs, results))
        for part, found in self._exchange(work):
            if part.query_heads is not None:
                out[:, part.query_heads] = found[OUTPUT]
                if lse is not None:
                    lse[:, part.query_heads] = found[LSE]
        return out

    def _exchange(
        self,
        work: Sequence[_Work],
    ) -> list[tuple[Part, dict[int, Tensor]]]:
        sent: list[tuple[Part, Bound, Sent]] = []
        for part, run, inputs, results in work:
            link, stream = self._bound[part.shard]
            sent.append((part, (link, stream), link.send_run(stream, run, inputs, results)))
        return [(part, link.receive_run(stream, each)) for part, (link, stream), each in sent]

    def _parts(self, layer: int) -> tuple[Part, ...]:
        return self._compute.topology.parts(layer, self._options.num_query_heads)

    def _shape(self, name: str) -> tuple[int, int, int]:
        topology = self._compute.topology
        heads = topology.num_kv_heads if name in ("key", "value") else self._options.num_query_heads
        return self.num_tokens, heads, topology.head_dim

    def _check(self, *tensors: tuple[str, Tensor]) -> None:
        if self._token is None:
            raise PreconditionError("the plan is closed")
        self._compute.check_process()
        dtype = self._compute.dtype
        for name, tensor in tensors:
            check_rows(name, tensor, self._shape(name))
            if name != "query" and tensor.dtype != dtype:
                raise InvalidArgumentError.of(name, f"{dtype} expected, got {tensor.dtype}")
