"""The cache service as a process: sockets, health, reflection, metrics, start and drain."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvplane.cache.service.clock import RunningClock
from kvplane.cache.service.config import CacheConfig
from kvplane.cache.service.control_plane import ControlPlane
from kvplane.cache.service.keys import Keys
from kvplane.cache.service.servicers import CacheServicer, RegistryServicer
from kvplane.v1 import cache_pb2, registry_pb2
from kvplane.v1.cache_pb2_grpc import add_CacheServiceServicer_to_server
from kvplane.v1.registry_pb2_grpc import add_PoolRegistryServiceServicer_to_server
from kvplane.wire.addresses import socket_path
from kvplane.wire.options import server_options

_log = structlog.get_logger(__name__)

CACHE_SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
REGISTRY_SERVICE = registry_pb2.DESCRIPTOR.services_by_name["PoolRegistryService"].full_name
TICK_SECONDS = 0.25
"""How often leases and silent shards are looked at: well inside the second that a clean-up may take (I8)."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class CacheServer:
    """One cache service. `start`, then `wait` or `stop`."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.addresses: list[str] = []
        """Addresses that are bound, with the ports that were chosen."""
        self.plane: ControlPlane
        self._server: grpc.aio.Server
        self._health = health.aio.HealthServicer()
        self._ticker: asyncio.Task[None] | None = None
        self._metrics: tuple[Any, Any] | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Bind and serve. Raises `RuntimeError` that names an address which cannot be bound."""
        loop = asyncio.get_running_loop()

        def call_later(delay: float, call: Callable[[], None]) -> None:
            loop.call_later(delay, call)

        keys = Keys.load(self.config.key_path)
        self.plane = ControlPlane(self.config, RunningClock(loop.time), call_later, keys)
        self._server = grpc.aio.server(options=server_options())
        # The stubs call RPCs abstract that the generated base answers with UNIMPLEMENTED.
        cache_servicer: type[Any] = CacheServicer
        registry_servicer: type[Any] = RegistryServicer
        add_CacheServiceServicer_to_server(cache_servicer(self.plane), self._server)
        add_PoolRegistryServiceServicer_to_server(registry_servicer(self.plane), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self.config.reflection:
            names = (CACHE_SERVICE, REGISTRY_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        # Only this user may connect, from the first moment on.
        mask = os.umask(0o177)
        try:
            self.addresses = [self._bind(address) for address in self.config.listen]
        finally:
            os.umask(mask)
        await self._server.start()
        if self.config.metrics_address:
            host, _, port = self.config.metrics_address.rpartition(":")
            self._metrics = prometheus_client.start_http_server(int(port), host, self.plane.metrics.registry)
        await self._publish_health()
        self._ticker = loop.create_task(self._tick())
        _log.info("listening", addresses=self.addresses)

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus endpoint."""
        assert self._metrics is not None
        return int(self._metrics[0].server_port)

    def _bind(self, address: str) -> str:
        path = socket_path(address)
        if path is not None:
            _private(path.parent)
            _remove_stale(path)
            self._server.add_insecure_port(address)
            return address
        try:
            port = self._add_tcp(address)
        except RuntimeError as error:
            raise RuntimeError(f"listen: cannot bind {address}: {error}") from error
        return f"{address.rpartition(':')[0]}:{port}"

    def _add_tcp(self, address: str) -> int:
        config = self.config
        if config.tls_certificate is None or config.tls_key is None:
            return self._server.add_insecure_port(address)
        authorities = config.tls_client_ca.read_bytes() if config.tls_client_ca else None
        pair = (config.tls_key.read_bytes(), config.tls_certificate.read_bytes())
        credentials = grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)
        return self._server.add_secure_port(address, credentials)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.plane.tick()
                await self._publish_health()
            except Exception:
                _log.exception("tick failed")

    async def _publish_health(self) -> None:
        """The process as a whole is up as soon as shards can dial in; CacheService once a pool is open."""
        up = _NOT_SERVING if self.plane.draining else _SERVING
        await self._health.set("", up)
        await self._health.set(REGISTRY_SERVICE, up)
        await self._health.set(CACHE_SERVICE, _SERVING if self.plane.ready else _NOT_SERVING)

    async def stop(self) -> None:
        """Drain: not serving, engines are told, running calls get their time, sockets are removed."""
        _log.info("draining")
        self.plane.drain(self.config.drain_seconds)
        await self._publish_health()
        if self._ticker is not None:
            self._ticker.cancel()
        await self._server.stop(self.config.drain_seconds)
        if self._metrics is not None:
            self._metrics[0].shutdown()
            self._metrics[0].server_close()
            self._metrics[1].join()
        for address in self.addresses:
            path = socket_path(address)
            if path is not None:
                path.unlink(missing_ok=True)
        self._stopped.set()
        _log.info("stopped")

    async def run(self) -> None:
        """Start, serve until SIGTERM or SIGINT, drain."""
        await self.start()
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled.set)
        await signalled.wait()
        await self.stop()


def _private(folder: Path) -> None:
    """Make the socket's folder, or see that it is this user's alone. Raises `RuntimeError` when it is not."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if folder.name.startswith("kvplane") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise RuntimeError(f"listen: {folder} belongs to another user, or others may write to it")


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises `RuntimeError` when somebody does, or when it is no socket."""
    if not path.exists():
        return
    if not path.is_socket():
        raise RuntimeError(f"listen: {path} is there and is no socket")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise RuntimeError(f"listen: another process listens on {path}")
