"""Remote mode: the compute services execute for the engine, on tables that the cache service granted and signed."""

import itertools
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Literal, Self

import grpc
import numpy.typing as npt
import torch

from kvplane.client.compute.attach_socket import NOT_REACHABLE
from kvplane.client.compute.batch import Options, batch_of
from kvplane.client.compute.interface import Transport
from kvplane.client.compute.link import ShardLink
from kvplane.client.compute.remote_plan import Bound, RemotePlan
from kvplane.client.compute.stream import ShardStream
from kvplane.client.compute.topology import Topology
from kvplane.client.state import SessionState
from kvplane.v1 import compute_pb2
from kvplane.wire.errors import (
    DeadlineExceededError,
    KvplaneError,
    LimitExceededError,
    PreconditionError,
    UnsupportedFeatureError,
)
from kvplane.wire.options import channel_options
from kvplane.wire.packed import pack_u32, pack_u64

# Why memory cannot be shared although the shard is well: it is elsewhere, somebody else's, or has none left.
_NO_SHARED_MEMORY = ("OTHER_HOST", "OTHER_USER", NOT_REACHABLE)


class RemoteCompute:
    """See `Compute`. One Execute stream per shard, opened anew by the plan after one that broke. Used by one thread."""

    def __init__(
        self,
        state: SessionState,
        *,
        transport: Transport = "auto",
        credentials: grpc.ChannelCredentials | None = None,
        timeout_seconds: float,
    ) -> None:
        self.topology = Topology(state.pool)
        self.num_layers = len(self.topology.layers)
        self.num_kv_heads, self.head_dim = self.topology.num_kv_heads, self.topology.head_dim
        self.dtype, self.block_tokens = self.topology.dtype, self.topology.block_tokens
        self.transport: Literal["shm", "inline"] = "inline"
        shards = range(len(self.topology.shards))
        self.device = torch.device("cpu")
        self.final_layer: int | None = min(max(self.topology.held_layers(shard)) for shard in shards)
        self._state = state
        self._plan_ids = itertools.count(1)
        self._open: set[RemotePlan] = set()
        self._undrained: list[int] = []
        """Tokens of plans whose streams broke before every shard had said that they are closed."""
        self._copies: list[int] = []
        """Copies that the shards run with the grants that order them; not acknowledged yet."""
        self._closed = False
        self.links: list[ShardLink] = []
        with ExitStack() as undo:
            for shard in self.topology.shards:
                channel = (
                    grpc.insecure_channel(shard.address, options=channel_options())
                    if credentials is None
                    else grpc.secure_channel(shard.address, credentials, options=channel_options())
                )
                link = ShardLink(state, shard, channel, timeout_seconds)
                undo.callback(link.close)
                self.links.append(link)
            for link in self.links:
                _ = link.stream
            if transport != "inline" and self._share_memory(required=transport == "shm"):
                self.transport = "shm"
            undo.pop_all()
        state.track_plans()

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
    ) -> RemotePlan:
        """See `Compute.plan`."""
        self._check_open()
        self.topology.check_query_heads(num_query_heads)
        own = self.topology.window_tokens
        asked = [*(() if window is None else (window,)), *(windows or {}).values()]
        if any(each != own for each in asked):
            raise UnsupportedFeatureError(
                f"window: shards attend with the pool's own window ({own}), another one is not built",
                metadata={"feature": "plan_windows", "field": "window"},
            )
        options = Options(num_query_heads, scale, soft_cap, own, {})
        token = self._state.plan_opened()
        try:
            self._state.check_declared()
            changes = self._state.take_changes()
            self._copies += [copy.op_id for copy in changes.copies]
            grants = self._state.take_grants()
            for link in self.links:
                link.add_grants(grants)
            batch = batch_of(self._state, sequence_ids, query_lengths, kv_lengths)
            plan = compute_pb2.Plan(
                plan_id=next(self._plan_ids),
                step_id=self._state.last_step,
                sequence_ids=pack_u64(batch.sequence_ids),
                query_lengths=pack_u32(batch.query_lengths),
                kv_lengths=pack_u32(batch.kv_lengths),
                options=compute_pb2.AttentionOptions(scale=scale, soft_cap=soft_cap or 0.0),
            )
        except BaseException:
            self._state.plan_closed(token)
            raise
        bound = self._open_plan(plan, token)
        self._state.copies_done(self._copies)
        self._copies = []
        # Every shard has answered on its newest stream, behind whatever an older one had queued.
        for undrained in self._undrained:
            self._state.plan_closed(undrained)
        self._undrained.clear()
        made = RemotePlan(self, token, plan.plan_id, batch.num_tokens, options, bound)
        self._open.add(made)
        return made

    def check_process(self) -> None:
        """Raises `SessionClosedError` or `ForkedProcessError`."""
        self._state.check_usable()

    def plan_closed(self, plan: RemotePlan, token: int, *, drained: bool) -> None:
        """A plan ended; `drained` once nothing of it runs for sure."""
        self._open.discard(plan)
        if drained:
            self._state.plan_closed(token)
        else:
            self._undrained.append(token)

    def close(self) -> None:
        """Close what plans are open, pass on grants that wait (the next compute access is not told them again), and end
        the streams."""
        if self._closed:
            return
        self._closed = True
        with suppress(KvplaneError):
            for plan in list(self._open):
                plan.close()
            grants = [] if self._state.closed else self._state.take_grants()
            for link in self.links:
                link.add_grants(grants)
                link.apply_grants()
            for token in self._undrained:
                self._state.plan_closed(token)
        for link in self.links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        self.check_process()
        if self._closed:
            raise PreconditionError("the compute access is closed")

    def _share_memory(self, *, required: bool) -> bool:
        try:
            for link in self.links:
                link.open_arena()
        except (PreconditionError, LimitExceededError) as error:
            if required or not (isinstance(error, LimitExceededError) or error.reason in _NO_SHARED_MEMORY):
                raise
            for link in self.links:
                link.close_arena()
            return False
        return True

    def _open_plan(self, plan: compute_pb2.Plan, token: int) -> list[Bound]:
        sent: list[tuple[ShardLink, ShardStream, int, int]] = []
        answered = 0
        try:
            for link in self.links:
                sent.append((link, *link.send_plan(plan)))  # noqa: PERF401 - what was sent is closed on an error
            for link, stream, request_id, num_grants in sent:
                stream.receive(request_id)
                answered += 1
                link.confirmed(num_grants)
        except BaseException as error:
            # Shards that have it, or will, close it behind it; those that refused it answer that they do not know it.
            for _, stream, _, _ in sent:
                with suppress(KvplaneError):
                    stream.send(close=compute_pb2.ClosePlan(plan_id=plan.plan_id))
            waiting = [(stream, request_id) for _, stream, request_id, _ in sent[answered:]]
            if not waiting or (_refused(error, waiting[0][0]) and all(_over(*each) for each in waiting[1:])):
                self._state.plan_closed(token)
            else:
                self._undrained.append(token)  # a shard may run its copies still
            raise
        return [(link, stream) for link, stream, _, _ in sent]


def _over(stream: ShardStream, request_id: int) -> bool:
    """Whether a shard has answered a plan, so that nothing of it runs."""
    try:
        stream.receive(request_id)
    except KvplaneError as error:
        return _refused(error, stream)
    return True


def _refused(error: BaseException, stream: ShardStream) -> bool:
    """Whether an error is a shard's answer, and not that there was none."""
    answered = isinstance(error, KvplaneError) and not isinstance(error, DeadlineExceededError)
    return answered and stream.error is None
