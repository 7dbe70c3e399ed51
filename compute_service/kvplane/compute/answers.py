"""Answers of an Execute stream: written in the order in which the device thread finished, which is the stream's own."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from kvplane.compute.metrics import Metrics
from kvplane.v1 import compute_pb2
from kvplane.wire.errors import InternalError, KvplaneError
from kvplane.wire.status import to_status

Write = Callable[[compute_pb2.ExecuteResponse], Awaitable[None]]


class Answers:
    """Collects answers and writes them; how many are outstanding is bounded by whoever reads requests."""

    def __init__(self, write: Write, metrics: Metrics, limit: int) -> None:
        self._write = write
        self._metrics = metrics
        self._limit = limit
        self._outstanding = 0
        self._ready: deque[compute_pb2.ExecuteResponse] = deque()
        self._flushing: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._failed: BaseException | None = None
        """What ended writing: the peer is gone."""

    def expect(self, request_id: int) -> Callable[[compute_pb2.ExecuteResponse, BaseException | None], None]:
        """What to call when the request has its answer, or its refusal."""
        self._outstanding += 1

        def done(response: compute_pb2.ExecuteResponse, error: BaseException | None) -> None:
            if error is not None:
                if not isinstance(error, KvplaneError):
                    error = InternalError(f"{type(error).__name__} in the executor")
                self._metrics.refusals.labels(error.reason).inc()
                response = compute_pb2.ExecuteResponse(refused=to_status(error))
            response.request_id = request_id
            self._ready.append(response)
            if self._flushing is None and self._failed is None:
                self._flushing = asyncio.get_running_loop().create_task(self._flush())

        return done

    async def room(self) -> None:
        """Wait until another request may be read. Raises what a failed write raised."""
        while self._outstanding >= self._limit:
            await self._change()
        if self._failed is not None:
            raise self._failed

    async def drained(self) -> None:
        """Wait until everything is written. Raises what a failed write raised."""
        while self._outstanding:
            await self._change()

    def close(self) -> None:
        """Write nothing more."""
        if self._flushing is not None:
            self._flushing.cancel()

    async def _change(self) -> None:
        if self._failed is not None:
            raise self._failed
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    async def _flush(self) -> None:
        try:
            while self._ready:
                await self._write(self._ready.popleft())
                self._outstanding -= 1
        except Exception as failed:  # raised by whoever waits or asks next
            self._failed = failed
        finally:
            self._flushing = None
            changed, self._changed = self._changed, None
            if changed is not None and not changed.done():
                changed.set_result(None)
