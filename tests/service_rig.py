"""A running cache service for tests: a real server on a Unix socket, in a thread with an event loop of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvplane.cache.service.config import CacheConfig
from kvplane.cache.service.server import CacheServer
from kvplane.client.control import GrpcCacheControl, connect
from kvplane.v1 import types_pb2

Result = TypeVar("Result")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Wait for a condition; fail with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)


class RunningService:
    """One cache service."""

    def __init__(self, folder: Path, **settings: object) -> None:
        settings.setdefault("listen", [f"unix:{folder}/cache.sock"])
        settings.setdefault("metrics_address", "127.0.0.1:0")
        settings.setdefault("drain_seconds", 0.5)
        self.server = CacheServer(CacheConfig(**settings))  # type: ignore[arg-type]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self.server.start())
        self.address = self.server.addresses[0]
        self._channels: list[grpc.Channel] = []

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def on_loop(self, call: Callable[[], Result]) -> Result:
        """Run a function on the server's loop, between two messages."""

        async def work() -> Result:
            return call()

        return self.run(work())

    def control(self) -> GrpcCacheControl:
        """A client."""
        channel = connect(self.address)
        self._channels.append(channel)
        return GrpcCacheControl(channel)

    def wait_ready(self, pool_id: str = "default") -> None:
        """Wait until a pool is open."""
        pools = self.server.plane.pools
        wait_until(
            lambda: pool_id in pools and pools[pool_id].state == types_pb2.POOL_STATE_READY, f"pool {pool_id} is ready"
        )

    def check_integrity(self) -> None:
        """Prove the invariants of every pool."""

        def check() -> None:
            for pool in self.server.plane.pools.values():
                if pool.core is not None:
                    pool.core.check_integrity()

        self.on_loop(check)

    def stop(self) -> None:
        """Drain and stop."""
        for channel in self._channels:
            channel.close()
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
