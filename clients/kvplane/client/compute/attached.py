"""Attached mode: this process maps every shard of the pool and computes by itself (design section 8).

It is trusted, so the rules that bound its damage are here. Before anything is launched: hold bits, stamps, the shards'
incarnations once more, the lease. When a shard says that the lease is over, nothing is launched any more, and once no
plan is open the shard is told so.
"""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

import grpc
import numpy as np
import numpy.typing as npt
import torch

from kvplane.client.compute.attach_socket import Attachment, attach
from kvplane.client.compute.attached_plan import AttachedPlan
from kvplane.client.compute.batch import Options, batch_of
from kvplane.client.compute.copies import run_copies
from kvplane.client.compute.holds import Holds
from kvplane.client.compute.memory import MappedShard, map_shard
from kvplane.client.compute.topology import Topology, at_shard
from kvplane.client.compute.work import Works
from kvplane.client.opening import RETRY_SECONDS
from kvplane.client.state import SessionState
from kvplane.client.values import BlockCopy
from kvplane.v1 import compute_pb2, types_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceStub
from kvplane.wire.errors import (
    KvplaneError,
    LaunchPausedError,
    PoolLostError,
    PreconditionError,
    SessionExpiredError,
    UnavailableError,
)
from kvplane.wire.options import channel_options


class AttachedCompute:
    """See `Compute`. Plans are made and run by one thread; a thread per shard listens for the end of the lease."""

    transport: Literal["shm", "inline"] = "shm"
    final_layer: int | None = None

    def __init__(
        self,
        state: SessionState,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_seconds: float,
        rank: int = 0,
        device_index: int = 0,
    ) -> None:
        self.topology = Topology(state.pool)
        self.num_layers = len(self.topology.layers)
        self.num_kv_heads, self.head_dim = self.topology.num_kv_heads, self.topology.head_dim
        self.dtype, self.block_tokens = self.topology.dtype, self.topology.block_tokens
        self._state = state
        self._closed = False
        self._lock = threading.Lock()
        self._ended: KvplaneError | None = None
        """Why nothing is launched any more."""
        self._to_drain: dict[int, int] = {}
        """Lease epochs that shards, by index, wait to hear drained."""
        self._open: set[AttachedPlan | int] = set()
        """Open plans, and tokens of plans that are being made."""
        self._copies: list[BlockCopy] = []
        self.shards: list[MappedShard] = []
        with ExitStack() as undo:
            self._attachments = self._attach(undo, credentials, timeout_seconds, rank, device_index)
            self._holds = Holds(self.shards)
            self.works = Works(self.topology, self.shards)
            self._listeners = [
                threading.Thread(target=self._listen, args=(index,), name=f"kvplane-attached-{index}", daemon=True)
                for index in range(len(self._attachments))
            ]
            undo.pop_all()
        self.device = self.shards[0].device
        state.track_plans()
        for listener in self._listeners:
            listener.start()

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
    ) -> AttachedPlan:
        """See `Compute.plan`."""
        self.topology.check_query_heads(num_query_heads)
        own = self.topology.window_tokens
        options = Options(num_query_heads, scale, soft_cap, own if window is None else window, dict(windows or {}))
        with self._lock:
            # From here on no drain is said before the plan is closed.
            self.check_launch()
            self._check_incarnations()
            # Before the plan counts as open: what the newest step let go of is not in its tables.
            completed_step = self._state.completed_step
            token = self._state.plan_opened()
            self._open.add(token)
        made: AttachedPlan | None = None
        try:
            self._prepare(completed_step)
            batch = batch_of(self._state, sequence_ids, query_lengths, kv_lengths)
            columns = -(-int(batch.kv_lengths.max(initial=0)) // self.block_tokens)
            tables = self._state.sequences.blocks[batch.rows, :columns]
            made = AttachedPlan(self, token, batch, tables, options)
            with self._lock:
                self._open.add(made)
                self._open.discard(token)
            return made
        except BaseException:
            self.plan_closed(made, token)
            raise

    def check_launch(self) -> None:
        """Raises why nothing may be launched: `SessionClosedError`, `ForkedProcessError`, `PreconditionError` when this
        is closed, `SessionExpiredError` when a shard said that the lease is over, `PoolLostError` when it gave the
        memory up, `UnavailableError` when it went away, `LaunchPausedError` when the lease is too old."""
        self._state.check_usable()
        if self._closed:
            raise PreconditionError("the compute access is closed")
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        self._state.lease.check()

    def _check_incarnations(self) -> None:
        """A renewal by a control plane that was superseded counts for nothing: its successor may give away what this
        session has in its tables (docs/protocol.md). Raises `LaunchPausedError`."""
        known = self._state.pool.incarnation
        for shard in self.shards:
            if shard.incarnation > known:
                error = LaunchPausedError(
                    f"the shard follows incarnation {shard.incarnation} of the cache service, this session knows "
                    f"{known}; the next result says what of its tables is left",
                    metadata={"incarnation": str(shard.incarnation)},
                    retry_after_seconds=RETRY_SECONDS,
                )
                raise at_shard(error, shard.shard)

    def wait_for_device(self) -> None:
        """Return when everything that this process launched has completed: kernels of the CPU have when they return."""
        for device in {shard.device for shard in self.shards if shard.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def plan_closed(self, plan: AttachedPlan | None, token: int) -> None:
        """A plan ended, or was not made."""
        self._state.plan_closed(token)
        with self._lock:
            self._open -= {plan, token}
            self._drain()

    def close(self) -> None:
        """Close what plans are open, tell every shard that nothing is launched any more, and unmap."""
        if self._closed:
            return
        for plan in [each for each in self._open if isinstance(each, AttachedPlan)]:
            plan.close()
        self._closed = True
        self._holds.clear()
        for attachment in self._attachments:
            attachment.send_drained(self._state.lease_epoch)
            attachment.wake()
        for listener in self._listeners:
            listener.join()
        for attachment in self._attachments:
            attachment.close()
        self._holds.forget()
        self.works.forget()
        for shard in self.shards:
            shard.close()
        self.shards.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attach(
        self,
        undo: ExitStack,
        credentials: grpc.ChannelCredentials | None,
        timeout_seconds: float,
        rank: int,
        device_index: int,
    ) -> list[Attachment]:
        made = []
        for index, shard in enumerate(self.topology.shards):
            with _channel(shard, credentials) as channel:
                attachment = attach(
                    ComputeServiceStub(channel),
                    self._state,
                    shard,
                    compute_pb2.ATTACH_PURPOSE_POOL,
                    timeout_seconds=timeout_seconds,
                    rank=rank,
                )
            undo.callback(attachment.close)
            made.append(attachment)
            mapped = map_shard(attachment, self._state.pool, self.topology, index, device_index)
            undo.callback(mapped.close)
            self.shards.append(mapped)
        return made

    def _prepare(self, completed_step: int) -> None:
        """What has to happen before anything is launched, in this order. What fails is tried again by the next plan."""
        state, holds = self._state, self._holds
        changes = state.take_changes()
        self._copies += changes.copies
        holds.apply(changes, completed_step)
        holds.stamp()
        state.lease.check()
        state.check_declared()
        if self._copies:
            copies, self._copies = self._copies, []
            # A destination that was let go of, its step complete, may be another's by now.
            live = [each for each in copies if holds.is_current(each.destination_id, each.destination_generation)]
            run_copies(self.shards, live)
            holds.copied(np.array([each.source_id for each in copies], np.int64), state.last_step)
            state.copies_done([each.op_id for each in copies])

    def _listen(self, index: int) -> None:
        attachment = self._attachments[index]
        while (message := attachment.receive()) is not None:
            if message.HasField("lease_ended"):
                epoch = message.lease_ended.lease_epoch
                ended = SessionExpiredError(
                    f"lease {epoch} of session {self._state.session_id} is over; nothing is launched any more",
                    metadata={"lease_epoch": str(epoch)},
                )
                with self._lock:
                    self._end(at_shard(ended, attachment.shard))
                    self._to_drain[index] = epoch
                    self._drain()
            elif message.HasField("pool_released"):
                epoch = message.pool_released.pool_epoch
                lost = PoolLostError(f"epoch {epoch} of the pool is over", metadata={"pool_epoch": str(epoch)})
                with self._lock:
                    self._end(at_shard(lost, attachment.shard))
        if not self._closed:
            gone = UnavailableError("the attach connection closed; open another compute access")
            with self._lock:
                self._end(at_shard(gone, attachment.shard))

    def _end(self, reason: KvplaneError) -> None:
        if self._ended is None:
            self._ended = reason

    def _drain(self) -> None:
        """Under the lock: tell the shards that wait for it, once nothing runs."""
        if not self._open:
            for index, epoch in self._to_drain.items():
                self._attachments[index].send_drained(epoch)
            self._to_drain.clear()


def _channel(shard: types_pb2.Shard, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is not None:
        return grpc.secure_channel(shard.address, credentials, options=channel_options())
    return grpc.insecure_channel(shard.address, options=channel_options())
