"""A remote session's way to one shard: its stream, the grants it may not have yet, and how tensors get there."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import torch
from torch import Tensor

from kvplane.client.compute.arena import FIRST_ARENA_BYTES, Arena, slice_bytes
from kvplane.client.compute.attach_socket import attach
from kvplane.client.compute.dtypes import torch_dtype, wire_dtype
from kvplane.client.compute.stream import ShardStream
from kvplane.client.compute.topology import at_shard
from kvplane.client.state import SessionState
from kvplane.v1 import compute_pb2, step_pb2, types_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.errors import KvplaneError, LimitExceededError
from kvplane.wire.limits import MESSAGE_BYTES

GRANTS_PER_REQUEST = 64
"""Grants that go with a plan or in one ApplyGrants: far below what a message may hold."""

_OVERHEAD_BYTES = 1 << 16
"""Room in a message besides tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A run that was sent to a shard."""

    request_id: int
    results: dict[int, Tensor]
    """By role: places in the arena where results come to lie. Empty: they come inline."""


class ShardLink:
    """See the module. Used by one thread."""

    def __init__(
        self,
        state: SessionState,
        shard: types_pb2.Shard,
        channel: grpc.Channel,
        timeout_seconds: float,
    ) -> None:
        self.shard = shard
        self._state = state
        self._channel = channel
        self._stub = ComputeServiceStub(channel)
        self._timeout = timeout_seconds
        self._stream: ShardStream | None = None
        self._grants: list[step_pb2.Grant] = []
        """Not known to be applied, in order."""
        self._arena: Arena | None = None

    # Stream and grants

    @property
    def stream(self) -> ShardStream:
        """The open stream; opened anew when it broke, or belongs to an older lease. Raises what refuses that."""
        stream = self._stream
        if stream is not None and (stream.error is not None or stream.lease_epoch != self._state.lease_epoch):
            stream.close()
            stream = self._stream = None
        if stream is None:
            stream = self._stream = ShardStream(self._stub, self._state, self.shard, self._timeout)
        return stream

    def add_grants(self, grants: Sequence[step_pb2.Grant]) -> None:
        """Grants to pass on with the next plan, as `SessionState.take_grants` gives them: one that replaces all tables,
        which makes those before it void, comes first or not at all."""
        if grants and step_pb2.GrantBody.FromString(grants[0].body).reset:
            self._grants.clear()
        self._grants.extend(grants)

    @property
    def waiting_grants(self) -> int:
        """Grants that are not known to be applied."""
        return len(self._grants)

    def apply_grants(self, *, leave: int = 0) -> None:
        """Have the shard apply grants, until no more than `leave` wait. Raises what refuses one of them."""
        while len(self._grants) > leave:
            some = self._grants[:GRANTS_PER_REQUEST]
            stream = self.stream
            stream.receive(stream.send(apply_grants=compute_pb2.ApplyGrants(grants=some)))
            del self._grants[: len(some)]

    def send_plan(self, plan: compute_pb2.Plan) -> tuple[ShardStream, int, int]:
        """Send a plan with what grants wait. Returns the stream, the request and how many grants went with it."""
        self.apply_grants(leave=GRANTS_PER_REQUEST)
        stream = self.stream
        mine = compute_pb2.Plan()
        mine.CopyFrom(plan)
        mine.grants.extend(self._grants)
        return stream, stream.send(plan=mine), len(self._grants)

    def confirmed(self, count: int) -> None:
        """The oldest grants are applied. Without that word they go with the next plan again: twice changes nothing."""
        del self._grants[:count]

    # Tensors

    def open_arena(self, num_bytes: int = FIRST_ARENA_BYTES) -> None:
        """Share memory of so many bytes, in place of any before. Raises what `attach` raises."""
        attachment = attach(
            self._stub,
            self._state,
            self.shard,
            compute_pb2.ATTACH_PURPOSE_ARENA,
            timeout_seconds=self._timeout,
            arena_bytes=-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE,
        )
        older, self._arena = self._arena, Arena(attachment, self.shard)
        if older is not None:
            older.close()

    def close_arena(self) -> None:
        """Send tensors inline from now on."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def send_run(
        self,
        stream: ShardStream,
        run: compute_pb2.Run,
        inputs: Sequence[tuple[types_pb2.TensorRole.ValueType, Tensor]],
        results: Sequence[tuple[types_pb2.TensorRole.ValueType, tuple[int, ...], torch.dtype]],
    ) -> Sent:
        """Send a run with its tensors. Raises `LimitExceededError` for more than an arena or a message may hold."""
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in inputs]
        sizes += [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in results]
        if self._arena is None:
            self._check_message(sum(sizes))
            run.tensors.extend(_inline(role, tensor) for role, tensor in inputs)
            run.tensors.extend(
                compute_pb2.Tensor(role=role, dtype=wire_dtype("out", dtype), shape=shape)
                for role, shape, dtype in results
            )
            return Sent(stream.send(run=run), {})
        needed = sum(map(slice_bytes, sizes))
        if needed > self._arena.half_bytes:
            self.open_arena(4 * needed)
        arena = self._arena
        offsets = iter(arena.place(sizes))
        places: dict[int, Tensor] = {}
        for role, tensor in inputs:
            offset = next(offsets)
            arena.tensor(offset, tensor.shape, tensor.dtype).copy_(tensor.detach())
            run.tensors.append(_placed(role, tuple(tensor.shape), tensor.dtype, arena.arena_id, offset))
        for role, shape, dtype in results:
            offset = next(offsets)
            places[role] = arena.tensor(offset, shape, dtype)
            run.tensors.append(_placed(role, shape, dtype, arena.arena_id, offset))
        return Sent(stream.send(run=run), places)

    def receive_run(self, stream: ShardStream, sent: Sent) -> dict[int, Tensor]:
        """Results of a run by role; read them before the next run but one. Raises what refused it."""
        answer = stream.receive(sent.request_id).run
        return sent.results or {tensor.role: _tensor(tensor) for tensor in answer.tensors}

    def close(self) -> None:
        """End stream, arena and channel."""
        try:
            if self._stream is not None:
                self._stream.close()
        finally:
            self.close_arena()
            self._channel.close()

    def _check_message(self, num_bytes: int) -> None:
        if num_bytes > MESSAGE_BYTES - _OVERHEAD_BYTES:
            error: KvplaneError = LimitExceededError(
                f"tensors of {num_bytes} bytes do not fit a message of {MESSAGE_BYTES}; split the batch",
                metadata={"limit": "message_bytes", "value": str(MESSAGE_BYTES)},
            )
            raise at_shard(error, self.shard)


def _inline(role: types_pb2.TensorRole.ValueType, tensor: Tensor) -> compute_pb2.Tensor:
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return compute_pb2.Tensor(role=role, dtype=wire_dtype("tensor", tensor.dtype), shape=tensor.shape, inline=data)


def _placed(
    role: types_pb2.TensorRole.ValueType, shape: tuple[int, ...], dtype: torch.dtype, arena_id: int, offset: int
) -> compute_pb2.Tensor:
    place = compute_pb2.ArenaSlice(arena_id=arena_id, offset=offset)
    return compute_pb2.Tensor(role=role, dtype=wire_dtype("tensor", dtype), shape=shape, arena=place)


def _tensor(message: compute_pb2.Tensor) -> Tensor:
    dtype, shape = torch_dtype(message.dtype), tuple(message.shape)
    if not message.inline:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(message.inline), dtype=dtype).view(shape)
