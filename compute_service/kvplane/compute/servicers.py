"""The gRPC servicer: decode, call, encode. Errors are mapped in one place."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import structlog

from kvplane.compute.attachments import Attachments
from kvplane.compute.block_reads import BlockReads
from kvplane.compute.block_writes import BlockWrites
from kvplane.compute.execute import ExecuteStreams
from kvplane.compute.metrics import Metrics
from kvplane.v1 import compute_pb2
from kvplane.v1.compute_pb2_grpc import ComputeServiceServicer
from kvplane.wire.errors import InternalError, KvplaneError
from kvplane.wire.status import abort_status

_log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


class ComputeServicer(ComputeServiceServicer):
    """ComputeService."""

    def __init__(
        self,
        attachments: Attachments,
        socket_path: str,
        streams: ExecuteStreams,
        reads: BlockReads,
        writes: BlockWrites,
        describe: Callable[[], compute_pb2.GetShardResponse],
        metrics: Metrics,
        lost_after_seconds: float,
    ) -> None:
        self._attachments = attachments
        self._socket_path = socket_path
        self._streams = streams
        self._reads = reads
        self._writes = writes
        self._describe = describe
        self._metrics = metrics
        self._lost_after_seconds = lost_after_seconds

    async def Attach(self, request: compute_pb2.AttachRequest, context: Context) -> compute_pb2.AttachResponse:
        """A ticket for the attach socket."""
        ticket = await self._answered(context, "Attach", self._attachments.request(request, context.peer()))
        return compute_pb2.AttachResponse(socket_path=self._socket_path, ticket=ticket)

    async def Execute(  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride] - it writes, it does not yield
        self, request_iterator: AsyncIterator[compute_pb2.ExecuteRequest], context: Context
    ) -> None:
        """Plans and runs of a remote session; answers are written with `context.write`, without generators between."""
        serving = self._streams.serve(request_iterator, context.write, self._lost_after_seconds)
        await self._answered(context, "Execute", serving)

    async def ReadBlocks(
        self, request: compute_pb2.ReadBlocksRequest, context: Context
    ) -> AsyncIterator[compute_pb2.ReadBlocksResponse]:
        """Bytes of blocks."""
        async for response in self._streamed(context, "ReadBlocks", self._reads.read(request)):
            self._metrics.totals.read_bytes += len(response.piece.payload)
            yield response

    async def WriteBlocks(
        self, request_iterator: AsyncIterator[compute_pb2.WriteBlocksRequest], context: Context
    ) -> AsyncIterator[compute_pb2.WriteBlocksResponse]:
        """Bytes into blocks."""
        written = 0
        async for response in self._streamed(context, "WriteBlocks", self._writes.write(request_iterator)):
            self._metrics.totals.written_bytes += max(0, response.written_bytes - written)
            written = response.written_bytes
            yield response

    async def GetShard(self, request: compute_pb2.GetShardRequest, context: Context) -> compute_pb2.GetShardResponse:  # noqa: ARG002
        """What this service is."""
        return self._describe()

    async def _answered(self, context: Context, name: str, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except KvplaneError as error:
            await self._refuse(context, name, error)
        except grpc.aio.BaseError:
            # The peer is gone.
            raise
        except Exception:
            _log.exception("rpc failed", rpc=name)
            await self._refuse(context, name, InternalError(f"{name} failed; see the server's log"))

    async def _streamed(self, context: Context, name: str, responses: AsyncIterator[Answer]) -> AsyncIterator[Answer]:
        try:
            async for response in responses:
                yield response
        except KvplaneError as error:
            await self._refuse(context, name, error)
        except grpc.aio.BaseError:
            raise
        except Exception:
            _log.exception("rpc failed", rpc=name)
            await self._refuse(context, name, InternalError(f"{name} failed; see the server's log"))
        finally:
            # At once and not when the garbage is collected: what the call held is given back here.
            await responses.aclose()  # type: ignore[attr-defined]

    async def _refuse(self, context: Context, name: str, error: KvplaneError) -> NoReturn:
        _log.info("rpc", rpc=name, code=error.code.name, reason=error.reason)
        self._metrics.refusals.labels(error.reason).inc()
        await context.abort_with_status(abort_status(error))
        raise error
