"""The compute service as a process: memory, device thread, sockets, control stream, start and drain."""

import asyncio
import gc
import os
import signal
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
import prometheus_client
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvplane import kernels
from kvplane.compute import crc32c, inventory, memory, sockets
from kvplane.compute.arenas import Arenas
from kvplane.compute.attach_socket import AttachSocket
from kvplane.compute.attachments import Attachments
from kvplane.compute.block_reads import BlockReads
from kvplane.compute.block_writes import BlockWrites
from kvplane.compute.config import ComputeConfig
from kvplane.compute.control import ControlClient
from kvplane.compute.events import Events
from kvplane.compute.execute import ExecuteStreams
from kvplane.compute.executor import Executor
from kvplane.compute.identity import FEATURES, identity_of, max_blocks, registration_of
from kvplane.compute.metrics import Gauges, Metrics
from kvplane.compute.pool import invalidate, reopen_pool
from kvplane.compute.runs import Runs
from kvplane.compute.servicers import ComputeServicer
from kvplane.compute.state import Holding, ShardState
from kvplane.compute.tickets import Tickets
from kvplane.v1 import compute_pb2, registry_pb2, types_pb2
from kvplane.v1.compute_pb2_grpc import add_ComputeServiceServicer_to_server
from kvplane.wire.options import server_options

_log = structlog.get_logger(__name__)

COMPUTE_SERVICE = compute_pb2.DESCRIPTOR.services_by_name["ComputeService"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ComputeServer:
    """One compute service. `start`, then `stop`; `run` does both around a signal."""

    def __init__(self, config: ComputeConfig) -> None:
        self.config = config
        self.addresses: list[str] = []
        """Addresses that are bound, with the ports that were chosen."""
        self.state = ShardState(identity_of(config))
        self.metrics = Metrics()
        self._health = health.aio.HealthServicer()
        self._http: tuple[Any, Any] | None = None
        self._following: asyncio.Task[None] | None = None
        self._started = AsyncExitStack()
        """Ends what was started, the newest first."""

    async def start(self) -> None:
        """Take up memory that is there, compile, bind, serve, dial the control plane. Raises `RuntimeError` that names
        an address which cannot be bound, and `LimitExceededError` when the budget holds no pool. Nothing stays open
        then."""
        try:
            await self._start()
        except BaseException:
            await self._started.aclose()
            raise

    async def _start(self) -> None:
        config, state, layout = self.config, self.state, self.state.identity.layout
        if config.threads is not None:
            kernels.set_num_threads(config.threads)
        self._started.callback(os.close, memory.claim(state.identity.folder))
        device, pool = state.identity.device, None
        if device.survives:
            pool = reopen_pool(state.identity.folder, layout, state.identity.boot_id)
        else:
            invalidate(state.identity.folder)
            self._started.callback(self._give_up_pool)
        if pool is None:
            max_blocks(config, state.identity)
        else:
            state.holding = Holding.of(pool, state.identity.folder)
            _log.info("memory taken up", pool_epoch=pool.pool_epoch, num_blocks=pool.num_blocks)
        await asyncio.to_thread(device.warm_up, layout)
        await asyncio.to_thread(crc32c.warm_up)
        self._executor = Executor(config.queue_capacity, device.run)
        self._started.push_async_callback(self._executor.close)
        self._events = Events()
        self._arenas = Arenas(config.arena_bytes)
        self._attachments = Attachments(state, self._executor, self._events, self._arenas, Tickets(time.monotonic))
        self._attachments.resume()
        looking = asyncio.create_task(self._attachments.drains.run())
        self._started.callback(looking.cancel)
        attach_socket = AttachSocket(config.attach_socket, self._attachments)
        self._started.push_async_callback(attach_socket.stop)
        attach_socket.start()
        # Before the server's: calls that run on while it drains still have their control plane.
        self._started.push_async_callback(self._stop_following)
        await self._serve()
        self._control = ControlClient(
            lambda: sockets.cache_channel(config),
            lambda: registration_of(config, state.identity, self._advertised, self._held()),
            state,
            self._executor,
            self._events,
            self._followed,
            self._attachments.confirmed,
        )
        self._followed_holding = state.holding
        self._following = asyncio.create_task(self._control.run())
        self.metrics.watch(self._gauges)
        if config.metrics_address:
            host, _, port = config.metrics_address.rpartition(":")
            self._http = prometheus_client.start_http_server(int(port), host, self.metrics.registry)
            self._started.callback(_stop_http, *self._http)
        await self._publish_health()
        _log.info("device", device=device.name, index=device.index)
        _log.info("listening", addresses=self.addresses, boot_id=state.identity.boot_id)

    async def stop(self) -> None:
        """Drain: not serving, no new plans, running calls get their time. The memory stays for the next start."""
        _log.info("draining")
        self.state.draining = True
        await self._publish_health()
        await self._started.aclose()
        _log.info("stopped")

    def _give_up_pool(self) -> None:
        """Its blocks go with this process."""
        holding, self.state.holding = self.state.holding, None
        if holding is not None:
            users = [each.pidfd for each in holding.processes.all() if each.pidfd is not None]
            holding.pool.release(users, unlink=True)

    async def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def _stop_serving(self) -> None:
        await self._server.stop(self.config.drain_seconds)
        for address in self.addresses:
            sockets.unlink(address)

    async def run(self) -> None:
        """Start, serve until SIGTERM or SIGINT, drain."""
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled.set)
        await self.start()
        # What the libraries have made stays: collections need not look at it in the middle of a step.
        gc.collect()
        gc.freeze()
        await signalled.wait()
        await self.stop()

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus endpoint."""
        assert self._http is not None
        return int(self._http[0].server_port)

    @property
    def _advertised(self) -> str:
        return self.config.advertise or self.addresses[0]

    async def _serve(self) -> None:
        config, state = self.config, self.state
        runs = Runs(state, self._arenas, self.metrics.totals)
        # The stubs call RPCs abstract that the generated base answers with UNIMPLEMENTED.
        servicer: type[Any] = ComputeServicer
        self._server = grpc.aio.server(options=server_options())
        add_ComputeServiceServicer_to_server(
            servicer(
                self._attachments,
                os.fspath(config.attach_socket),
                ExecuteStreams(state, self._executor, runs, self.metrics, self._away_seconds),
                BlockReads(state, self._executor),
                BlockWrites(state, self._executor),
                self._describe,
                self.metrics,
                config.ttl_seconds,
            ),
            self._server,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if config.reflection:
            names = (COMPUTE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self._started.push_async_callback(self._stop_serving)
        for address in config.listen:
            self.addresses.append(sockets.bind(self._server, address, config))
        await self._server.start()
        for address in self.addresses:
            sockets.make_private(address)

    def _held(self) -> registry_pb2.HeldPool | None:
        return None if self.state.holding is None else inventory.held_pool(self.state.holding)

    async def _followed(self, command: registry_pb2.ControlResponse, ack: registry_pb2.CommandAck, done: bool) -> None:
        kind = command.WhichOneof("command") or "unknown"
        self.metrics.commands.labels(kind).inc()
        if ack.status.code:
            _log.warning("command failed", command=kind, sequence=command.sequence, message=ack.status.message)
        if kind == "fence_session" and done:
            self._attachments.fenced(command.fence_session)
        elif kind == "forget_session" and done:
            holding, session_id = self.state.holding, command.forget_session.session_id
            # A session with a newer lease was not forgotten.
            if holding is None or holding.sessions.get(session_id) is None:
                self._arenas.close_session(session_id)
        elif kind in ("create_pool", "destroy_pool", "advance_epoch", "pool_state"):
            # Refused or not: a pool that could not be created has cost the old one as well.
            old, self._followed_holding = self._followed_holding, self.state.holding
            if old is not None and (self.state.holding is None or self.state.holding.pool is not old.pool):
                self._attachments.pool_released(old)
            await self._publish_health()

    def _away_seconds(self) -> float:
        return 0.0 if self._control.connected else time.monotonic() - self._control.last_heard

    def _describe(self) -> compute_pb2.GetShardResponse:
        state, holding = self.state, self.state.holding
        identity = state.identity
        return compute_pb2.GetShardResponse(
            shard=types_pb2.Shard(
                rank=identity.spec.rank,
                address=self._advertised,
                boot_id=identity.boot_id,
                connected=self._control.connected,
                spec=identity.spec,
            ),
            pool_id=identity.pool_id,
            pool_epoch=holding.pool.pool_epoch if holding else 0,
            incarnation=state.incarnation,
            pool_bytes=holding.pool.pool_bytes if holding else 0,
            control_plane_connected=self._control.connected,
            features=sorted(FEATURES),
        )

    def _gauges(self) -> Gauges:
        holding = self.state.holding
        sessions = list(holding.sessions) if holding else []
        return Gauges(
            pool_bytes=holding.pool.pool_bytes if holding else 0,
            arena_bytes=self._arenas.used_bytes,
            queue_depth=self._executor.depth,
            sessions=len(sessions),
            attached_processes=self._attachments.count,
            open_plans=sum(len(session.plans) for session in sessions),
            control_plane_connected=self._control.connected,
        )

    async def _publish_health(self) -> None:
        """The process is up as soon as it listens; ComputeService once there is a pool."""
        up = _NOT_SERVING if self.state.draining else _SERVING
        await self._health.set("", up)
        await self._health.set(COMPUTE_SERVICE, up if self.state.holding is not None else _NOT_SERVING)


def _stop_http(server: Any, thread: Any) -> None:
    server.shutdown()
    server.server_close()
    thread.join()
