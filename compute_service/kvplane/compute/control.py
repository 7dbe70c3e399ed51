"""The control stream: a shard dials the control plane, follows its commands, and dials again when it is away.

Nothing that engines do waits for it: attached and granted work goes on while the control plane is away.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import structlog

from kvplane.compute import inventory
from kvplane.compute.commands import Commands
from kvplane.compute.events import Events
from kvplane.compute.executor import Executor
from kvplane.compute.state import ShardState
from kvplane.v1 import registry_pb2, registry_pb2_grpc
from kvplane.wire import features
from kvplane.wire.errors import KvplaneError, SupersededError
from kvplane.wire.status import from_rpc_error

_log = structlog.get_logger(__name__)

FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 5.0
MIN_TTL_MS = 300
REGISTER_SECONDS = 10.0
"""Deadline of Register."""

if TYPE_CHECKING:
    ControlStream = grpc.aio.StreamStreamCall[registry_pb2.ControlRequest, registry_pb2.ControlResponse]

Followed = Callable[[registry_pb2.ControlResponse, registry_pb2.CommandAck, bool], Awaitable[None]]
"""Called on the event loop before a command is acknowledged, with whether it was carried out now: not so when it was
refused, and when it came again."""


class ControlClient:
    """Keeps one control stream, the newest incarnation's."""

    def __init__(
        self,
        channel: Callable[[], grpc.aio.Channel],
        registration: Callable[[], registry_pb2.RegisterRequest],
        state: ShardState,
        executor: Executor,
        events: Events,
        followed: Followed,
        seen: Callable[[registry_pb2.ShardEvent], None],
    ) -> None:
        self._channel = channel
        self._registration = registration
        self._state = state
        self._executor = executor
        self._events = events
        self._followed = followed
        self._seen = seen
        self._commands = Commands(state)
        self._outgoing: asyncio.Queue[registry_pb2.ControlRequest] = asyncio.Queue()
        self.connected = False
        self.last_heard = time.monotonic()
        """When the control plane was last there, in seconds of `time.monotonic`."""

    async def run(self) -> None:
        """Register and follow until cancelled."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            begin = time.monotonic()
            try:
                async with self._channel() as channel:
                    await self._follow(registry_pb2_grpc.PoolRegistryServiceStub(channel))
            except grpc.RpcError as error:
                _log.warning("control plane away", reason=from_rpc_error(error).message)
            except KvplaneError as error:
                _log.warning("control stream ended", reason=error.reason, message=error.message)
            except Exception:
                # Whatever it was (a certificate that is not there yet, a fault of ours): without this task the shard
                # would never be back.
                _log.exception("control stream failed")
            finally:
                self.connected = False
                self._events.closed()
            if time.monotonic() - begin > LAST_BACKOFF_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            # Shards of one pool lose their control plane together; they should not come back in step.
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _follow(self, stub: "registry_pb2_grpc.PoolRegistryServiceAsyncStub") -> None:
        request = await self._executor.submit(self._registration, bounded=False)
        answer = await stub.Register(request, timeout=REGISTER_SECONDS)
        features.require(answer.required_features)
        stream = stub.Control()
        self._outgoing = asyncio.Queue()
        try:
            await self._executor.submit(lambda: self._registered(answer), bounded=False)
        except SupersededError:
            await self._supersede(stream, answer.registration_id)
            raise
        self._send(
            registry_pb2.ControlRequest(
                open=registry_pb2.ControlOpen(
                    registration_id=answer.registration_id, last_sequence=self._commands.last_sequence
                )
            )
        )
        self._events.opened(lambda event: self._send(registry_pb2.ControlRequest(event=event)))
        self.connected, self.last_heard = True, time.monotonic()
        _log.info("registered", incarnation=answer.incarnation, keep_pool=answer.keep_pool)
        helpers = [
            asyncio.create_task(self._write(stream)),
            asyncio.create_task(self._beat(max(answer.ttl_ms, MIN_TTL_MS) / 3000)),
        ]
        try:
            await self._read(stub, stream, answer.registration_id)
        finally:
            stream.cancel()
            for helper in helpers:
                helper.cancel()
            # A writer whose stream broke has nothing to add: the reader has seen it too.
            await asyncio.gather(*helpers, return_exceptions=True)

    def _registered(self, answer: registry_pb2.RegisterResponse) -> None:
        self._state.raise_incarnation(answer.incarnation)
        self._state.grant_key = answer.grant_key

    async def _read(
        self,
        stub: "registry_pb2_grpc.PoolRegistryServiceAsyncStub",
        stream: "ControlStream",
        registration_id: int,
    ) -> None:
        async for message in stream:
            self.last_heard = time.monotonic()
            if message.WhichOneof("command") == "events_seen":
                for event in self._events.confirm(message.events_seen.event_id):
                    self._seen(event)
                continue
            if message.WhichOneof("command") == "request_inventory" and message.sequence > self._commands.last_sequence:
                await self._upload(stub, message.request_inventory, registration_id)
            try:
                ack, done = await self._executor.submit(
                    lambda m=message: self._commands.carry_out(m),  # type: ignore[misc]
                    bounded=False,
                )
            except SupersededError:
                await self._supersede(stream, registration_id)
                raise
            await self._followed(message, ack, done)
            self._send(registry_pb2.ControlRequest(ack=ack))

    async def _upload(
        self,
        stub: "registry_pb2_grpc.PoolRegistryServiceAsyncStub",
        request: registry_pb2.RequestInventory,
        registration_id: int,
    ) -> None:
        holding = self._state.holding
        call = stub.Inventory()
        jobs = [] if holding is None else inventory.chunks(holding, request)
        try:
            for job in jobs:
                chunk = await self._executor.submit(job, bounded=False)
                chunk.inventory_id, chunk.registration_id = request.inventory_id, registration_id
                chunk.boot_id = self._state.identity.boot_id
                await call.write(chunk)
            await call.done_writing()
        except asyncio.InvalidStateError:
            # The control plane ended the call before it had all; how, the call itself says.
            _log.info("upload ended early", inventory_id=request.inventory_id)
        await call

    async def _supersede(
        self,
        stream: "ControlStream",
        registration_id: int,
    ) -> None:
        """Tell an older control plane that its time is over."""
        superseded = registry_pb2.Superseded(incarnation=self._state.incarnation)
        opening = registry_pb2.ControlOpen(registration_id=registration_id)
        messages = [registry_pb2.ControlRequest(event=registry_pb2.ShardEvent(superseded=superseded))]
        if not self.connected:
            messages.insert(0, registry_pb2.ControlRequest(open=opening))
        # One that has ended the stream has nobody left to tell.
        with suppress(asyncio.InvalidStateError):
            for message in messages:
                await stream.write(self._stamped(message))
            await stream.done_writing()

    async def _write(self, stream: "ControlStream") -> None:
        while True:
            await stream.write(await self._outgoing.get())

    async def _beat(self, interval_seconds: float) -> None:
        while True:
            await asyncio.sleep(interval_seconds)
            holding = self._state.holding
            beat = registry_pb2.ShardHeartbeat(
                pool_bytes=holding.pool.pool_bytes if holding else 0, queue_depth=self._executor.depth
            )
            self._send(registry_pb2.ControlRequest(heartbeat=beat))

    def _send(self, message: registry_pb2.ControlRequest) -> None:
        self._outgoing.put_nowait(self._stamped(message))

    def _stamped(self, message: registry_pb2.ControlRequest) -> registry_pb2.ControlRequest:
        message.incarnation, message.boot_id = self._state.incarnation, self._state.identity.boot_id
        return message
